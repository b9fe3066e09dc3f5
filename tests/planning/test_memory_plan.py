# SPDX-License-Identifier: Apache-2.0
"""Memory of a run phase by phase, with a model of 2**30 weights."""

from dataclasses import replace

import pytest

from tests.planning.planning import GPU, NODE, read_shape
from verl.config.model import ModelConfig
from verl.config.ppo import AlgorithmConfig, DataConfig, PPOConfig, TrainerConfig
from verl.config.reward_servers import RewardServerConfig
from verl.config.rollout import RolloutConfig
from verl.config.schema import ConfigError, load_config, value_at
from verl.config.worker import ActorConfig, WorkerConfig
from verl.planning.layer_sizes import Stack
from verl.planning.machine import GIB, find_machine
from verl.planning.memory_plan import Planner
from verl.planning.planned_model import PlannedPass
from verl.planning.planned_run import planned_ppo, with_options
from verl.planning.report import ENGINE_SHARE, misfit_text, remedy, with_largest_sizes

UPDATE = "worker.actor.micro_batch_size_per_device_for_update"
EXPERIENCE = "worker.actor.micro_batch_size_per_device_for_experience"


def make_config(changes=None):
    config = PPOConfig(
        data=DataConfig(rollout_batch_size=32, max_prompt_length=1024, max_response_length=1024),
        algorithm=AlgorithmConfig(),
        worker=WorkerConfig(
            actor=ActorConfig(
                global_batch_size=16,
                micro_batch_size_per_device_for_update=1,
                micro_batch_size_per_device_for_experience=1,
                share_prompt=False,
                model=ModelConfig(model_path="model"),
            ),
            rollout=RolloutConfig(n=4, tensor_parallel_size=1, gpu_memory_utilization=0.5),
        ),
        trainer=TrainerConfig(n_gpus_per_node=4),
    )
    return with_options(config, changes or {})


def planner(machine):
    return Planner(planned_ppo, read_shape, machine)


def phases_of(config, machine=GPU):
    return {phase.name: phase for phase in planner(machine)(config).phases}


def test_an_update_holds_weights_gradients_and_two_moments_of_its_shard():
    held = phases_of(make_config())["update_actor"].device

    assert held["weights"] == held["gradients"] == GIB  # 4 GiB on 4 ranks
    assert held["optimizer"] == 2 * GIB
    assert held["other models"] == GIB // 2  # the reference, in bf16


def test_a_step_has_a_phase_for_each_pass_of_each_model():
    everything = make_config({"algorithm.adv_estimator": "gae", "worker.critic.model.model_path": "model"})

    assert list(phases_of(make_config())) == ["load", "gen", "old", "update_actor", "ref", "save_checkpoint"]
    assert {"values", "update_critic"} < set(phases_of(everything))


def test_offloaded_models_wait_in_host_memory():
    here = phases_of(make_config())["ref"]
    away = phases_of(
        make_config(
            {
                "worker.actor.offload.offload_params": True,
                "worker.actor.offload.offload_optimizer": True,
            }
        )
    )["ref"]

    assert here.device_bytes - away.device_bytes == 3 * GIB  # of the actor: 1 of weights, 2 of moments
    assert "offloaded" not in here.host
    assert away.host["offloaded"] == 3 * GIB


def test_only_engines_that_keep_their_weights_hold_them_in_host_memory_while_they_sleep():
    discards = phases_of(make_config())["old"]
    keeps = phases_of(make_config({"worker.actor.model.lora.rank": 8}))["old"]

    assert "offloaded" not in discards.host
    assert keeps.host["offloaded"] == int(1.45 * 2 * GIB), "torch's page-locked memory is rounded up"


def test_a_sleeping_engine_keeps_graphs_and_buffers_on_the_gpu():
    asleep, eager = phases_of(make_config()), phases_of(make_config({"worker.rollout.enforce_eager": True}))

    assert asleep["update_actor"].device["sleeping engine"] == 3 * GIB
    assert eager["update_actor"].device["sleeping engine"] == GIB
    assert not any("sleeping engine" in asleep[name].device for name in ("load", "gen"))
    assert not any("sleeping engine" in phase.device for phase in phases_of(make_config(), NODE).values())


@pytest.mark.parametrize("machine", [GPU, NODE])
def test_an_engine_in_processes_of_its_own_takes_more_host_memory(machine):
    taken = {
        name: phases_of(make_config({"worker.rollout.name": name}), machine)["old"].host["process"]
        for name in ("hf", "vllm", "sglang")
    }

    assert taken["vllm"] - taken["hf"] == GIB // 4
    assert taken["sglang"] - taken["hf"] == int(1.2 * GIB), "a server and a scheduler, 0.6 GiB each"


def test_the_sampler_holds_float32_logits_of_all_sequences_that_run_at_once():
    config = make_config({"worker.rollout.max_num_seqs": 64})

    assert phases_of(config)["gen"].device["logits"] == 4 * 64 * 256


def test_shards_that_fsdp_keeps_in_host_memory_are_locked_one_by_one():
    held = phases_of(make_config({"worker.actor.fsdp.enable_cpu_offload": True}))["ref"].host["offloaded"]

    assert held == int(1.45 * GIB) + 2 * GIB


def test_the_engine_takes_its_share_of_a_gpu_while_it_samples():
    assert phases_of(make_config())["gen"].device["engine"] == 40 * GIB


def test_on_cpu_all_processes_of_a_node_share_its_memory():
    plan = planner(NODE)(make_config())
    phase = next(phase for phase in plan.phases if phase.name == "update_actor")
    process = phase.device_bytes + sum(phase.host.values())

    assert plan.node_bytes(phase) == 4 * process + sum(phase.node.values())
    assert plan.fits(phase)
    assert not replace(plan, machine=replace(NODE, host_bytes=plan.node_bytes(phase))).fits(phase)


def test_an_asynchronous_checkpoint_holds_a_copy_in_host_memory():
    copy = phases_of(make_config({"trainer.save_freq": 5}))["update_actor"]

    assert copy.host["checkpoint being written"] == 3 * GIB
    assert "checkpoint being written" not in phases_of(make_config())["update_actor"].host


@pytest.mark.parametrize(
    ("changes", "dynamic", "shares", "size", "line"),
    [
        ({}, False, False, 2, (4096, 2048)),
        ({}, False, True, 8, (2 * 1024 + 8 * 1024, 8 * 1024)),  # two groups of four
        ({}, True, False, 2, (4096, 2048)),
        ({}, True, True, 5, (5 * 2048, 5 * 2048 * 4 // 5)),  # of 5 tokens of a group, 4 are responses
        ({}, True, False, 64, (16 * 2048, 16 * 1024)),  # no more than there are: 16 rows
        ({"worker.actor.ulysses_size": 2}, False, False, 2, (2048, 1024)),
    ],
)
def test_a_micro_batch_has_the_tokens_of_its_full_rows(changes, dynamic, shares, size, line):
    config = make_config(changes)
    shape = read_shape(None, config.worker.actor.fsdp, option="", is_trained=True)

    one = PlannedPass("update_actor", size, UPDATE, rows=16, dynamic=dynamic, shares_prompt=shares)
    found = one.largest_micro_batch(planned_ppo(config).lengths, shape)

    assert (found.tokens, found.responses) == line


TOWER = Stack(layers=4, hidden=64, intermediate=256, heads=4, kv_heads=4, head_dim=16, params=1 << 16)
TEXT_AND_TOWER = replace(read_shape(None, ActorConfig().fsdp, option="", is_trained=True), tower=TOWER)


def phases_with_tower(config):
    def read(*args, **kwargs):
        return replace(read_shape(*args, **kwargs), tower=TOWER)

    return {phase.name: phase for phase in Planner(planned_ppo, read, GPU)(config).phases}


def test_a_frozen_tower_leaves_features_instead_of_its_activations():
    size = {UPDATE: 2}
    trained = phases_with_tower(make_config(size))["update_actor"].device
    frozen = phases_with_tower(make_config(size | {"worker.actor.model.freeze_vision_tower": True}))[
        "update_actor"
    ].device
    text = phases_of(make_config(size))["update_actor"].device

    hidden = TEXT_AND_TOWER.text.hidden
    assert frozen["activations"] == text["activations"] < trained["activations"]
    assert frozen["features of media"] == 2 * 2 * hidden * (2 * 1024)  # joined in bf16, of two prompts
    assert "features of media" not in trained


def test_ranks_that_share_rows_share_the_patches_of_their_media():
    lengths = planned_ppo(make_config({"worker.actor.ulysses_size": 2})).lengths
    shape = replace(TEXT_AND_TOWER, patches_per_token=4)

    one = PlannedPass("update_actor", 2, UPDATE, rows=16, dynamic=False, shares_prompt=False)
    found = one.largest_micro_batch(lengths, shape)

    assert found.patches == 2 * 1024 * 4 // 2
    assert found.media == found.tokens == (2 * 1024 + 2 * 1024) // 2  # any token that a rank holds


def test_a_misfit_names_the_option_and_a_value_that_fits():
    config, plan = make_config({UPDATE: 16}), planner(replace(GPU, device_bytes=14 * GIB))
    (phase,) = (phase for phase in plan(config).misfits() if phase.name == "update_actor")

    changes = remedy(config, phase, plan)
    text = misfit_text(config, phase, plan(config), plan)

    assert list(changes) == [UPDATE]
    assert f"set {UPDATE}={changes[UPDATE]}" in text
    assert "update_actor takes" in text
    assert "GiB of a GPU, 12.6 are usable" in text
    fixed = with_options(config, changes)
    assert "update_actor" not in [phase.name for phase in plan(fixed).misfits()]
    larger = with_options(config, {UPDATE: 2 * changes[UPDATE]})
    assert "update_actor" in [phase.name for phase in plan(larger).misfits()]


def test_a_remedy_of_several_options_leaves_out_what_is_set_already():
    set_already = {
        "worker.actor.model.enable_gradient_checkpointing": True,
        "worker.actor.offload.offload_optimizer": True,
        "worker.actor.offload.offload_params": True,
    }
    config = make_config(set_already | {"worker.actor.micro_batch_size_per_device_for_update": 16})
    found = []
    for gib in range(4, 40):
        plan = planner(replace(GPU, device_bytes=gib * GIB))
        phase = next(phase for phase in plan(config).phases if phase.name == "update_actor")
        changes = {} if plan(config).fits(phase) else remedy(config, phase, plan)
        assert not changes.keys() & set_already.keys(), gib
        found.append(len(changes))

    assert max(found) > 1


def test_an_engine_that_leaves_no_room_gets_a_smaller_share():
    config, plan = make_config({"worker.rollout.gpu_memory_utilization": 0.9}), planner(GPU)
    (phase,) = plan(config).misfits()

    (share,) = remedy(config, phase, plan).values()

    assert phase.name == "gen"
    assert 0.7 < share < 0.9


def engine_misfit(changes, gib):
    config, plan = make_config(changes), planner(replace(GPU, device_bytes=gib * GIB))
    (phase,) = (phase for phase in plan(config).misfits() if phase.name == "gen")
    return phase, misfit_text(config, phase, plan(config), plan)


def test_an_engine_must_hold_its_weights_and_one_sequence_in_its_share():
    # 2 GiB of weights in bf16, 2 of activations, and 2048 tokens of 2 bytes x 16 layers x 2 x 8 heads of 128.
    changes = {"worker.rollout.gpu_memory_utilization": 0.2, "worker.rollout.max_model_len": 2048}

    phase, text = engine_misfit(changes, 16)

    assert phase.engine == {
        "engine's weights": 2 * GIB,
        "its activations": 2 * GIB,
        "cache of a sequence": GIB // 8,
    }
    assert phase.engine_share == int(0.2 * 16 * GIB)
    assert text == (
        "gen: the rollout engine needs 4.1 GiB of a GPU (engine's weights 2.0, its activations 2.0, cache of"
        " a sequence 0.1), `worker.rollout.gpu_memory_utilization` (0.2) gives it 3.2:"
        " set worker.rollout.gpu_memory_utilization=0.3"
    )
    assert not phases_of(make_config(changes), NODE)["gen"].engine  # on CPU the cache has its own size


@pytest.mark.parametrize(
    ("gib", "others"),
    # 0.5 gives 4.0 of 8 GiB; 4.125, the context and the optimizer are more than the usable 7.2.
    [(12, ""), (8, f" {ENGINE_SHARE}=0.55 worker.actor.offload.offload_optimizer=true")],
)
def test_an_engine_that_no_share_holds_is_divided_over_more_gpus_and_then_others_make_room(gib, others):
    _, text = engine_misfit({"worker.rollout.dtype": "fp32"}, gib)

    assert "needs 6.2 GiB" in text  # 4 of weights, 2 of activations and 0.25 of cache
    assert text.endswith(f": set worker.rollout.tensor_parallel_size=2{others}")


def test_engines_on_gpus_of_their_own_must_hold_the_weights_too():
    own = {
        "worker.hybrid_engine": False,
        "trainer.n_gpus_for_rollout": 4,
        "worker.rollout.gpu_memory_utilization": 0.05,
    }

    phase, text = engine_misfit(own, 80)

    assert phase.device == phase.engine
    assert text.endswith("gives it 4.0: set worker.rollout.gpu_memory_utilization=0.1")


def test_auto_is_the_largest_divisor_whose_phases_fit():
    config, plan = (
        make_config({UPDATE: "auto", EXPERIENCE: "auto"}),
        planner(replace(GPU, device_bytes=14 * GIB)),
    )

    found = with_largest_sizes(config, plan)

    for key, phases, shares in (
        (UPDATE, ["update_actor"], [1, 2, 4, 8, 16]),  # 16 prompts x 4 on 4 ranks
        (EXPERIENCE, ["old", "ref"], [1, 2, 4, 8, 16, 32]),
    ):
        fits = {
            size: not {phase.name for phase in plan(with_options(found, {key: size})).misfits()} & set(phases)
            for size in shares
        }
        assert value_at(found, key) == max(size for size in shares if fits[size])
    assert 1 < value_at(found, UPDATE) < 16
    assert value_at(config, UPDATE) == "auto"  # the config itself stays


def test_auto_takes_the_whole_share_where_there_is_room():
    found = with_largest_sizes(
        make_config({UPDATE: "auto", EXPERIENCE: "auto"}), planner(replace(GPU, device_bytes=900 * GIB))
    )

    assert (value_at(found, UPDATE), value_at(found, EXPERIENCE)) == (16, 32)


def test_a_model_that_fits_not_even_one_sequence_is_refused_with_a_remedy():
    plan = planner(replace(GPU, device_bytes=6 * GIB))

    with pytest.raises(
        ValueError, match=rf"`{UPDATE}` \(auto\): not even one sequence fits: update_actor"
    ) as raised:
        with_largest_sizes(make_config({UPDATE: "auto"}), plan)

    assert "set worker.actor." in str(raised.value) or "use more devices" in str(raised.value)


@pytest.mark.parametrize("value", ["0", "most", "1.5"])
def test_a_micro_batch_size_is_a_number_or_auto(value):
    with pytest.raises(ConfigError, match=rf"`{UPDATE}` must be (an integer or auto|at least 1)"):
        load_config(PPOConfig, [f"{UPDATE}={value}"])


def test_the_memory_of_another_machine_can_be_given():
    assert find_machine("cpu", 64).host_bytes == 64 * GIB
    assert find_machine("cuda", 80).usable_device == int(0.9 * 80 * GIB)


def test_weights_on_their_way_to_other_processes_wait_in_host_memory():
    # two versions of 2**30 weights of 2 bytes on 4 ranks; four engines take 128 MiB of each GPU; with
    # changes each holds what it was sent
    own = {"worker.hybrid_engine": False, "trainer.n_gpus_for_rollout": 4}
    by_store, by_changes = (
        own | {"worker.rollout.weight_transport": way} for way in ("object_store", "delta")
    )

    sent, stored, changed = (
        phases_of(make_config(changes))["old"] for changes in (own, by_store, by_changes)
    )

    assert sent.host["published weights"] == stored.host["published weights"] == 2 * 2 * 2**30 // 4
    assert changed.host == sent.host
    assert sent.device["weights being sent"] == changed.device["weights being sent"] == 4 * (128 << 20)
    assert "weights being sent" not in stored.device
    assert changed.node["weights held by engines"] == 4 * 2 * 2**30
    assert "weights held by engines" not in sent.node | stored.node


def with_server(**options):
    server = RewardServerConfig(model_path="judge", gpu_memory_utilization=0.25, **options)
    return replace(make_config(), reward_servers={"judge": server})


def test_a_server_that_sleeps_has_a_phase_and_stays_on_the_gpu_in_the_others():
    phases = phases_of(with_server())

    assert phases["reward"].device["reward_servers.judge"] == GPU.device_bytes // 4
    assert phases["reward"].device["models"] == phases["gen"].device["models"]
    assert phases["update_actor"].device["reward_servers.judge, asleep"] == 4 * GIB  # context and graphs


def test_a_server_on_gpus_of_its_own_takes_none_of_the_others():
    phases = phases_of(with_server(colocate=False))

    assert phases["reward_servers.judge"].device["engine"] == GPU.device_bytes // 4
    assert phases["update_actor"].device == phases_of(make_config())["update_actor"].device
    assert "reward" not in phases


def test_servers_on_cpu_hold_weights_and_cache_on_the_node():
    ours, without = phases_of(with_server(n_gpus=2), NODE)["gen"], phases_of(make_config(), NODE)["gen"]

    # 2 replicas, each with 2 GiB of weights in bf16, 0.25 GiB of cache and a process of 1.1 GiB
    added = sum(ours.node.values()) - sum(without.node.values())
    assert added == pytest.approx(2 * 3.35 * GIB, rel=0.01)


def test_a_server_larger_than_its_share_takes_its_weights():
    server = RewardServerConfig(model_path="judge", gpu_memory_utilization=0.01, dtype="fp32", colocate=False)
    config = replace(make_config(), reward_servers={"judge": server})

    assert phases_of(config)["reward_servers.judge"].device["engine"] == 4 * GIB
    assert planner(GPU)(config).models[-1] == "reward_servers.judge: 1,073,741,824 parameters are served"


def test_a_server_that_leaves_no_room_gets_a_smaller_share():
    server = RewardServerConfig(model_path="judge", gpu_memory_utilization=0.95)
    config = replace(make_config(), reward_servers={"judge": server})
    plan = planner(GPU)
    (phase,) = [phase for phase in plan(config).misfits() if phase.name == "reward"]

    (change,) = remedy(config, phase, plan).items()

    # 72 GiB are usable; weights, moments and reference 3.5, the sleeping engine 3, the context 1: 64.5 of 80
    assert change == ("reward_servers.judge.gpu_memory_utilization", 0.8)


def test_a_quantized_engine_holds_a_byte_for_each_weight_outside_of_embeddings_and_head():
    plain = make_config()
    quantized = with_options(
        plain, {"worker.rollout.quantization": "fp8", "algorithm.rollout_correction.rollout_is": "token"}
    )
    run = planned_ppo(quantized)
    shape = read_shape(ModelConfig(), quantized.worker.actor.fsdp, option="", is_trained=True)

    assert planned_ppo(plain).engine.weights(shape) == 2 << 30
    assert run.engine.weights(shape) == (1 << 30) + (1 << 20)
    # gate and up in bf16 as they came, and joined
    assert phases_of(quantized)["gen"].device["a layer to quantize"] == 2 * 2 * (2 << 20)
    # its weights wait in host memory while it sleeps
    assert "offloaded" not in phases_of(plain)["update_actor"].host
    assert phases_of(quantized)["update_actor"].host["offloaded"] > run.engine.weights(shape)
