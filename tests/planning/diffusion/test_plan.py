# SPDX-License-Identifier: Apache-2.0
"""Plan of a diffusion run with a transformer of 1024 weights in four blocks."""

import subprocess
import sys

import pytest

from tests.planning.planning import STACK
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.ppo import AlgorithmConfig, DataConfig, PPOConfig, TrainerConfig
from verl.config.rollout import RolloutConfig
from verl.config.worker import ActorConfig, WorkerConfig
from verl.planning.diffusion.planned import PictureShape, Work
from verl.planning.machine import GIB, Machine
from verl.planning.memory_model import ModelShape
from verl.planning.memory_plan import Planner
from verl.planning.planned_run import planned_ppo, with_options
from verl.planning.speed.cluster import parse_cluster
from verl.planning.speed.step_time import Predictor

GPU = Machine("cuda", 80 * GIB, 1000 * GIB, "a GPU")
UPDATE = "worker.actor.micro_batch_size_per_device_for_update"


def read_pictures(model, fsdp, rollout, prompt_length):
    return PictureShape(
        transformer=ModelShape(
            params=1024, stored=4096, trained=1024, trained_stored=4096, root=0, trained_root=0,
            largest_stored=64, vocab=1, is_tied=False, text=STACK,
        ),
        blocks=(256,) * 4, buffers=10, text_encoders=5 * GIB, vae=GIB, latent=4, pixels=3,
        velocity=Work(products=1e14, attention=1e13, peak=1000.0),
        update=Work(products=4e14, attention=5e13, peak=7000.0, kept=4000.0),
        decoding=Work(products=1e12, peak=2.0 * GIB), encoding=Work(products=1e12),
    )  # fmt: skip


def make_config(changes=None):
    actor = ActorConfig(
        global_batch_size=8, micro_batch_size_per_device_for_update=2,
        micro_batch_size_per_device_for_experience=4, model=ModelConfig(model_path="model"),
        fsdp=FSDPConfig(mp_reduce_dtype="bf16"),
    )  # fmt: skip
    rollout = RolloutConfig(n=4, tensor_parallel_size=1, num_steps=6)
    config = PPOConfig(
        data=DataConfig(rollout_batch_size=8, max_prompt_length=16),
        algorithm=AlgorithmConfig(disable_kl=True),
        worker=WorkerConfig(actor=actor, rollout=rollout),
        trainer=TrainerConfig(n_gpus_per_node=4, diffusion=True),
    )
    return with_options(config, changes or {})


def phases_of(changes=None, machine=GPU):
    plan = Planner(planned_ppo, None, machine, read_pictures)(make_config(changes))
    return {phase.name: phase for phase in plan.phases}


def test_text_encoders_are_on_a_gpu_in_their_phase_alone_and_a_vae_while_pictures_are_sampled():
    phases = phases_of()

    assert [name for name, phase in phases.items() if "text encoders" in phase.device] == ["encode"]
    assert [name for name, phase in phases.items() if "VAE" in phase.device] == ["gen", "decode"]


def test_the_processes_of_a_node_share_text_encoders_and_vae():
    for phase in phases_of().values():
        assert phase.node["text encoders and VAE"] == 6 * GIB
        assert phase.host["staging buffer"] == 64 << 20
        assert "text encoders and VAE" not in phase.host


def test_on_cpu_each_process_has_them_once():
    phases = phases_of({"trainer.device": "cpu"}, Machine("cpu", 0, 400 * GIB, "a node"))

    for phase in phases.values():
        assert not {"text encoders", "VAE"} & set(phase.device)
        assert phase.host["text encoders and VAE"] == 6 * GIB and "text encoders and VAE" not in phase.node


def test_pictures_are_decoded_next_to_the_weights_that_sample():
    held = phases_of({"worker.actor.offload.offload_params": True})["decode"].device

    assert held["weights"] == 4096 // 4 and held["VAE"] == GIB and held["activations"] == 2 * GIB


def test_the_first_rank_reads_a_weight_at_a_time():
    load = phases_of()["load"]

    assert load.first_rank == {"first rank reads": 2 * 64}
    assert load.host.keys() == phases_of()["encode"].host.keys()


def test_sampling_holds_the_activations_of_the_pictures_that_run_together():
    assert phases_of()["gen"].device["activations"] == 4 * 1000


def test_an_update_holds_the_latents_of_a_call_of_the_model():
    held = phases_of()["update_actor"].device

    # Two latents. The most is held in the last block, with its weights and those of the next, 2 bytes each.
    assert held["activations"] == 2 * 7000
    assert held["gathered weights"] == 2 * (256 + 256)
    assert held["weights"] == held["gradients"] == 4096 // 4
    assert held["optimizer"] == 2 * 4096 // 4


def test_losses_of_whole_trajectories_hold_all_trained_steps_of_a_picture():
    whole = {"worker.actor.loss_type": "gspo"}

    assert phases_of(whole)["update_actor"].device["activations"] == 2 * 5 * 7000
    window = whole | {"worker.rollout.sde_window": [0, 2]}
    assert phases_of(window)["update_actor"].device["activations"] == 2 * 2 * 7000


def test_a_smaller_micro_batch_lowers_the_update():
    less = phases_of({UPDATE: 1})["update_actor"].device["activations"]

    assert less == (phases_of()["update_actor"].device["activations"]) / 2


@pytest.mark.parametrize(
    ("option", "value"),
    [("sde_window", [0, 2]), ("train_timestep_fraction", 0.4)],
    ids=["window", "fraction"],
)
def test_fewer_trained_steps_lower_the_time(option, value):
    fewer = {f"worker.rollout.{option}": value}

    assert seconds_of(fewer)["update_actor"] == pytest.approx(2 / 5 * seconds_of()["update_actor"], rel=0.01)


def seconds_of(changes=None):
    cluster = parse_cluster("4xH100")
    predict = Predictor(Planner(planned_ppo, None, cluster.machine, read_pictures), cluster)
    step = predict(make_config(changes))
    assert step.tokens == 32 and step.unit == "pictures"
    return {phase.name: phase.seconds for phase in step.phases}


def test_sampling_takes_time_in_proportion_to_steps_and_pictures():
    # 8 pictures of a rank with 6 steps each; an H100 does 989e12 operations a second at most
    expected = 8 * 6 * (1e14 / (0.62 * 989e12) + 1e13 / (0.4 * 989e12))

    assert seconds_of()["gen"] == pytest.approx(expected, rel=0.05)


def test_a_reference_adds_its_pass_to_the_update():
    with_kl = {"algorithm.disable_kl": False}

    assert seconds_of(with_kl)["update_actor"] > 1.2 * seconds_of()["update_actor"]


def test_the_plan_of_a_text_run_imports_no_diffusers():
    code = (
        "import sys, verl.planning.report, verl.planning.speed.report; assert 'diffusers' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
