# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a step: its operations, lengths, phases, and advice."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from statistics import fmean

import pytest
from transformers import AutoConfig

from tests.planning.planning import TOWER
from tests.planning.planning import read_shape as read_fixed_shape
from tests.planning.test_memory_plan import make_config
from verl.config.distillation import DistillationConfig, DistillationLossConfig, TeacherConfig
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.sft import SFTConfig
from verl.models.flops import FlopsCounter, PackedWork
from verl.models.hub_names import meta_model
from verl.models.tiny import save_tiny_model
from verl.planning.memory_plan import Planner
from verl.planning.model_sizes import read_shape
from verl.planning.planned_run import planned_ppo, planned_sft, with_options
from verl.planning.report import problems_of
from verl.planning.speed import operations, rollout_time
from verl.planning.speed.cluster import parse_cluster
from verl.planning.speed.modes import compare_modes, drawn_lengths
from verl.planning.speed.report import MIN_GAIN, advise
from verl.planning.speed.step_time import Predictor
from verl.planning.speed.workload import PassWork, Responses, expected_lengths, pass_work

NODE = parse_cluster("4xH100")


def predictor(cluster=NODE, response=None):
    return predictor_of(planned_ppo, read_fixed_shape, cluster, response)


def predictor_of(describe, read_shape, cluster=NODE, response=None):
    return Predictor(Planner(describe, read_shape, cluster.machine), cluster, mean_response=response)


def read_seeing_shape(*args, **kwargs):
    return replace(read_fixed_shape(*args, **kwargs), tower=TOWER)


def on_gpus(changes=None):
    return make_config({"trainer.device": "cuda"} | (changes or {}))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_operations_of_a_forward_pass_are_those_of_the_flops_counter(tmp_path, family):
    folder = save_tiny_model(tmp_path, family, hidden_size=256, intermediate_size=512)
    shape = read_shape(
        ModelConfig(model_path=str(folder)), FSDPConfig(), option="worker.actor.model", is_trained=True
    )
    lengths, to_head = [300, 500], 350
    work = PassWork(sum(lengths), to_head, sum(n * (n + 1) / 2 for n in lengths), 0, 0, 1, 1)

    counter = FlopsCounter(meta_model(AutoConfig.from_pretrained(folder)))
    counted, _ = counter.count(PackedWork([(length, ()) for length in lengths], to_head))
    done = operations.forward(shape, work)
    assert done.products + done.attention + done.head == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("mean", [10, 40, 300, 499, 500])
def test_lengths_have_the_mean_that_is_asked_for(mean):
    responses = Responses(mean, 500)

    middles = [(step + 0.5) / 4 for step in range(2000)]
    assert sum(map(responses.running, middles)) / 4 == pytest.approx(mean, rel=2e-3)
    assert sum(2 * at * responses.running(at) for at in middles) / 4 == pytest.approx(
        responses.mean_square, rel=2e-3
    )
    assert responses.longest(1000) <= 500


def test_a_step_has_the_phases_of_the_memory_plan_and_the_rest():
    step = predictor()(on_gpus())

    names = [phase.name for phase in step.phases]
    assert set(names) == {"gen", "sync_weights", "old", "ref", "update_actor", "controller"}
    assert step.seconds == pytest.approx(sum(phase.seconds for phase in step.phases))
    for phase in step.phases:
        assert phase.seconds == pytest.approx(sum(phase.parts.values()))
        assert all(value >= 0 for value in phase.parts.values()), phase


def test_a_frozen_tower_encodes_each_prompt_once_and_the_passes_encode_none():
    predict = predictor_of(planned_ppo, read_seeing_shape)
    trained = predict(on_gpus())
    frozen = predict(on_gpus({"worker.actor.model.freeze_vision_tower": True}))

    assert "encode" not in {phase.name for phase in trained.phases}
    encode, old = frozen.phase("encode"), trained.phase("old")
    saved = old.parts["products"] - frozen.phase("old").parts["products"]
    assert 0 < encode.parts["products"] == pytest.approx(saved / 4)  # of a prompt, not of its responses
    assert frozen.phase("update_actor").seconds < trained.phase("update_actor").seconds


def test_the_first_pass_reads_images_that_no_engine_in_the_processes_of_its_node_has_read():
    apart = {"worker.hybrid_engine": False, "trainer.n_gpus_for_rollout": 4}

    def reading(cluster, changes=None, phase="old"):
        config = on_gpus(changes)
        predict = predictor_of(planned_ppo, read_seeing_shape, parse_cluster(cluster))
        return predict(config).phase(phase).parts["reading images"]

    assert reading("4xH100", apart) > 0
    assert reading("4xH100") == reading("4xH100", phase="update_actor") == 0
    assert reading("4x4xH100") == pytest.approx(reading("4x4xH100", apart) * 3 / 4)


@pytest.mark.parametrize(
    ("seconds", "max_num_seqs", "hidden"), [(1e-3, 1024, "all"), (10, 1024, "prompts"), (10, 16, "more")]
)
def test_an_engine_waits_for_images_of_its_first_step_and_for_what_its_work_does_not_hide(
    monkeypatch, seconds, max_num_seqs, hidden
):
    # An engine gets 8 prompts of 256 tokens, and reads 512 tokens in a step: a quarter of 8 * 192 / 256
    # images is read in the first, each in a quarter of the time of one thread.
    first, later = seconds * 6 / 4 / 4, seconds * 6 / 4 * 3 / 4
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": max_num_seqs}
    config = on_gpus({f"worker.rollout.{name}": value for name, value in limits.items()})

    def parts(image_seconds):
        monkeypatch.setattr(rollout_time, "IMAGE_SECONDS", image_seconds)
        return predictor_of(planned_ppo, read_seeing_shape)(config).phase("gen").parts

    without, waited = parts(0.0), parts(seconds)["engine"] - parts(0.0)["engine"]
    sampling = sum(without.values()) - without["prompts"]
    # with 16 of 32 sequences at once, half of the sampling is over before the last prompt begins
    hides = {"all": later, "prompts": without["prompts"], "more": without["prompts"] + sampling / 2}
    assert waited == pytest.approx(first + later - hides[hidden])


def test_fine_tuning_with_a_frozen_tower_encodes_its_media_too():
    predict = predictor_of(planned_sft, read_seeing_shape)
    trained = with_options(SFTConfig(), {"trainer.device": "cuda", "trainer.n_gpus_per_node": 4})
    frozen = with_options(trained, {"worker.actor.model.freeze_vision_tower": True})

    saved = [predict(each).phase("update_actor").parts["products"] for each in (trained, frozen)]
    assert (
        0 < predict(frozen).phase("encode").parts["products"] < saved[0] - saved[1]
    )  # forward, not backward


def test_mlps_in_tiles_compute_their_last_product_again():
    def read(*args, **kwargs):
        shape = read_fixed_shape(*args, **kwargs)
        return replace(shape, text=replace(shape.text, is_tiled=True))

    sizes = {f"worker.actor.micro_batch_size_per_device_for_{name}": 16 for name in ("update", "experience")}
    whole, tiled = (
        predictor_of(planned_ppo, each)(on_gpus(sizes)).phase("update_actor").parts["products"]
        for each in (read_fixed_shape, read)
    )

    assert whole < tiled <= 4 / 3 * whole  # the layers of this shape have no other product


def test_products_take_half_the_time_on_a_gpu_of_twice_the_speed():
    fast = replace(NODE, gpu=replace(NODE.gpu, peak=2 * NODE.gpu.peak))
    slow_step, fast_step = predictor()(on_gpus()), predictor(fast)(on_gpus())

    for name in ("old", "update_actor"):
        products = fast_step.phase(name).parts["products"]
        assert 2 * products == pytest.approx(slow_step.phase(name).parts["products"])
        assert fast_step.phase(name).seconds <= slow_step.phase(name).seconds


def test_checkpointing_is_a_second_forward_pass_of_the_blocks():
    key = "worker.actor.model.enable_gradient_checkpointing"
    on, off = (predictor()(on_gpus({key: value})).phase("update_actor").parts for value in (True, False))
    forward = predictor()(on_gpus()).phase("old").parts

    assert on["attention"] - off["attention"] == pytest.approx(forward["attention"])
    assert on["elementwise"] - off["elementwise"] == pytest.approx(forward["elementwise"])
    assert on["softmax"] == off["softmax"]


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"worker.actor.share_prompt": True}, "update_actor"),
        ({"worker.rollout.enforce_eager": False}, "gen"),
        ({"worker.actor.offload.offload_optimizer": False}, "update_actor"),
        ({"worker.actor.model.enable_gradient_checkpointing": False}, "update_actor"),
    ],
)
def test_an_option_that_saves_work_shortens_its_phase(changes, phase):
    slow = on_gpus(
        {
            "worker.actor.share_prompt": False,
            "worker.rollout.enforce_eager": True,
            "worker.actor.offload.offload_optimizer": True,
            "worker.actor.model.enable_gradient_checkpointing": True,
        }
    )
    before, after = predictor()(slow), predictor()(with_options(slow, changes))

    assert after.phase(phase).seconds < before.phase(phase).seconds


def test_longer_responses_take_longer_in_each_phase_that_reads_them():
    short, long = predictor(response=100)(on_gpus()), predictor(response=800)(on_gpus())

    for name in ("gen", "old", "ref", "update_actor"):
        assert long.phase(name).seconds > short.phase(name).seconds


def teaching(mode="reverse_kl", number=1, epochs=1, **options):
    """The run of teachers, and the work of the first one."""
    teachers = {f"t{at}": TeacherConfig(model_path="m", **options) for at in range(number)}
    loss = DistillationLossConfig(loss_mode=mode)
    distillation = DistillationConfig(enabled=True, teacher_models=teachers, distillation_loss=loss)
    run = replace(planned_ppo(replace(on_gpus(), distillation=distillation)), epochs={"actor": epochs})
    model = next(model for model in run.models if model.is_teacher)
    shape = read_fixed_shape(model.model, model.fsdp, option="", is_trained=False)
    return run, pass_work(run, model, model.passes[0], expected_lengths(run), shape)


def test_each_of_two_teachers_is_expected_to_read_half_of_the_rows():
    (_, alone), (_, one_of_two) = teaching(), teaching(number=2)

    assert one_of_two.tokens == alone.tokens / 2
    assert one_of_two.pairs == alone.pairs / 2


def test_a_teacher_that_sees_longer_prompts_reads_longer_ones():
    run, usual = teaching()
    _, longer = teaching(max_prompt_length=2 * run.lengths.prompt)

    prompts = usual.tokens - usual.responses
    assert longer.tokens - longer.responses == pytest.approx(2 * prompts)
    assert longer.responses == usual.responses


@pytest.mark.parametrize(("mode", "passes"), [("reverse_kl", 3), ("kl", 1)])
def test_a_teacher_runs_in_each_epoch_of_an_update_that_compares_distributions(mode, passes):
    (_, once), (_, thrice) = teaching(mode), teaching(mode, epochs=3)

    assert thrice.tokens == passes * once.tokens


def test_weights_are_gathered_faster_where_each_node_has_all_of_them():
    cluster = parse_cluster("4x8xL40S")
    config = on_gpus({"trainer.nnodes": 4, "trainer.n_gpus_per_node": 8, "data.rollout_batch_size": 256})
    config = with_options(config, {"worker.actor.global_batch_size": 256})
    hybrid = with_options(config, {"worker.actor.fsdp.fsdp_size": 8})
    collectives = [predictor(cluster)(each).phase("old").parts["collectives"] for each in (config, hybrid)]

    assert collectives[1] < collectives[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"fsdp_size": 8}, False),
        ({"mp_reduce_dtype": "bf16"}, False),
        ({"enable_cpu_offload": True}, False),
    ],
)
def test_copies_sum_gradients_once_where_float32_sums_of_micro_batches_have_a_place(changes, expected):
    copies = FSDPConfig(fsdp_size=2)

    assert replace(copies, **changes).reduces_once(world_size=8) is expected


def test_advice_is_what_the_changed_run_is_predicted_to_take_and_it_fits():
    config = on_gpus({"worker.rollout.enforce_eager": True, "worker.actor.offload.offload_optimizer": True})
    predict = predictor()
    advice = advise(config, predict)

    assert {"worker.actor.share_prompt", "worker.rollout.enforce_eager"} <= {
        key for each in advice for key in each.changes
    }
    assert [each.seconds for each in advice] == sorted(each.seconds for each in advice)
    for each in advice:
        changed = with_options(config, each.changes)
        assert predict(changed).seconds == each.seconds < (1 - MIN_GAIN) * predict(config).seconds
        assert not predict.plan(changed).misfits()


@pytest.mark.nightly
def test_what_does_not_fit_is_not_advised():
    small = replace(NODE, gpu=replace(NODE.gpu, memory_gib=20))
    config = on_gpus(
        {"worker.actor.offload.offload_optimizer": True, "worker.actor.offload.offload_params": True}
    )
    key = "worker.actor.model.enable_gradient_checkpointing"
    batch = {"data.rollout_batch_size": 512, "worker.actor.global_batch_size": 512}
    config = with_options(config, batch | {"worker.actor.micro_batch_size_per_device_for_update": 4})

    assert any(key in each.changes for each in advise(config, predictor()))
    assert not any(key in each.changes for each in advise(config, predictor(small)))


COMMAND = """
import sys
from verl.trainer.main import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(status)
"""


def dry_run(folder, *arguments):
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 8)
    options = {
        "data.train_files": rows,
        "data.val_files": rows,
        "data.rollout_batch_size": 8,
        "worker.actor.global_batch_size": 8,
        "worker.actor.model.model_path": save_tiny_model(folder / "model", "qwen2"),
        "worker.rollout.tensor_parallel_size": 1,
        "worker.rollout.n": 4,
        "worker.rollout.max_num_batched_tokens": 8192,
        "worker.reward.reward_function": "examples/reward_function/math.py:compute_score",
        "trainer.save_checkpoint_path": folder / "checkpoints",
    }
    given = [f"{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-c", COMMAND, *given, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def seconds_of(output):
    return float(re.search(r"^  step +([\d.]+)", output, re.MULTILINE)[1])


def test_a_dry_run_on_a_named_cluster_predicts_its_step_without_torch(tmp_path):
    options = "trainer.nnodes=1", "trainer.n_gpus_per_node=1"
    lengths = "--mean-prompt=64", "--mean-response", "100"
    done = dry_run(tmp_path, *options, "--dry-run", "--on", "2x4xH100", *lengths)

    assert done.returncode == 0, done.stderr
    assert "trainer.device=cuda\n  trainer.nnodes=2\n  trainer.n_gpus_per_node=4\n" in done.stdout
    assert "2 nodes, cuda" in done.stdout  # the named cluster wins
    assert "79.6  1024.0  H100, in a node with 1024 GiB" in done.stdout
    assert "2x4xH100; assumed: prompts of 64 and responses of 100 tokens" in done.stdout
    assert seconds_of(done.stdout) > 1


def test_on_cpu_nothing_is_predicted(tmp_path):
    done = dry_run(tmp_path, "trainer.device=cpu", "--dry-run")

    assert done.returncode == 0, done.stderr
    assert "memory at its most" in done.stdout
    assert "predicted" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dry-run", "--on", "8xT4"], "`T4` is not a known device"),
        (["--dry-run", "--on"], "`--on=` must name a number of GPUs"),
        (["--on=8xH100"], "`--on` needs `--dry-run`"),
        (
            ["--dry-run", "--mean-response=none"],
            "`--mean-response=none` must be a number of tokens",
        ),
    ],
)
def test_a_wrong_switch_is_named(tmp_path, arguments, reason):
    done = dry_run(tmp_path, *arguments)

    assert done.returncode == 2
    assert reason in done.stderr


def sampling_config(changes):
    return on_gpus({"trainer.n_gpus_per_node": 4, "data.rollout_batch_size": 64} | changes)


@pytest.mark.nightly
def test_modes_are_compared_on_the_same_number_of_gpus_and_the_fastest_of_each_is_kept():
    config = sampling_config({"data.max_response_length": 8192})
    now, *others = compare_modes(config, predictor(response=1000))

    assert (now.mode, now.changes) == ("off", {})
    assert {other.mode for other in others} == {"partial", "one_step_off", "stream"}
    assert [other.rate for other in others] == sorted((other.rate for other in others), reverse=True)
    for other in others:
        changes = other.changes
        trained = changes["trainer.nnodes"] * changes["trainer.n_gpus_per_node"]
        assert trained + changes["trainer.n_gpus_for_rollout"] == 4
        assert changes["worker.hybrid_engine"] == (other.mode == "partial")
        assert problems_of(with_options(config, changes)) <= problems_of(config)


@pytest.mark.nightly
def test_partial_rollouts_gain_with_long_tails_and_nothing_where_engines_are_full_to_the_end():
    def gain(mean, maximum):
        config = sampling_config({"data.max_response_length": maximum, "worker.rollout.max_num_seqs": 64})
        now, *others = compare_modes(config, predictor(response=mean))
        return next(other.rate / now.rate for other in others if other.mode == "partial")

    assert gain(500, 16384) > 1.1
    assert gain(4096, 4096) < 1.05


@pytest.mark.nightly
def test_fewer_prompts_at_once_are_advised_where_the_longest_responses_hold_up_a_stream():
    config = sampling_config(
        {
            "data.max_response_length": 16384,
            "worker.rollout.n": 16,
            "worker.hybrid_engine": False,
            "trainer.n_gpus_for_rollout": 4,
            "trainer.async_training.mode": "stream",
            "trainer.async_training.staleness_threshold": 2,
        }
    )
    now, *others = compare_modes(config, predictor(response=1500))

    [own] = [other for other in others if other.mode == "stream"]
    assert set(own.changes) == {"trainer.async_training.max_inflight_prompts"}
    assert own.rate > 1.03 * now.rate and own.run.idle_training < now.run.idle_training


def test_drawn_lengths_have_the_mean_that_is_asked_for():
    lengths = list(islice(drawn_lengths(Responses(300, 1000)), 20_000))

    assert fmean(lengths) == pytest.approx(300, rel=0.03)
    assert max(lengths) <= 1000


def test_layers_that_ranks_share_take_half_the_products_of_twice_the_rows_and_sums():
    sizes = {f"worker.{role}.fsdp.tensor_parallel_size": 2 for role in ("actor", "ref")}
    whole, divided = (predictor()(on_gpus(changes)) for changes in ({}, sizes))

    for before, after in zip(whole.phases, divided.phases, strict=True):
        assert after.name == before.name
        if "products" in before.parts and before.name != "gen":
            assert after.parts["products"] == pytest.approx(before.parts["products"], rel=0.01)
            assert after.parts["summing activations"] > 0 == before.parts["summing activations"]
    assert divided.tokens == whole.tokens
