# SPDX-License-Identifier: Apache-2.0
"""Sizes of `fsdp.expert_parallel_size` that a plan proposes for a mixture of two layers."""

from dataclasses import replace

import pytest

from tests.planning.planning import GPU, read_shape
from tests.planning.test_memory_plan import make_config
from verl.planning.machine import GIB
from verl.planning.memory_plan import Planner, expert_sizes
from verl.planning.planned_run import planned_ppo
from verl.planning.report import remedy
from verl.planning.speed.cluster import parse_cluster
from verl.planning.speed.report import advise
from verl.planning.speed.step_time import Predictor

ACTOR, REF = (f"worker.{role}.fsdp.expert_parallel_size" for role in ("actor", "ref"))
PARAMS = (9 << 29) + (1 << 20)
LAYER = {"layers": 2, "params": 9 << 28, "experts": 1 << 31, "choices": 2}  # 2.25 Gi weights, 2 Gi of experts


def read_mixture(*args, **kwargs):
    shape = read_shape(*args, **kwargs)
    is_trained = shape.trained > 0
    return replace(
        shape,
        params=PARAMS,
        stored=shape.stored // shape.params * PARAMS,
        trained=PARAMS * is_trained,
        trained_stored=shape.stored // shape.params * PARAMS * is_trained,
        text=replace(shape.text, **LAYER),
        experts=1 << 32,
        trained_experts=(1 << 32) * is_trained,
        divisible_experts=24,
    )


def sizes_of(config, read=read_mixture, **options):
    return list(expert_sizes(planned_ppo(config), read, **options))


def on_gpus(changes=None, gpus=8):
    return make_config({"trainer.device": "cuda", "trainer.n_gpus_per_node": gpus} | (changes or {}))


def test_all_mixtures_of_a_run_get_each_size_that_divides_ranks_and_experts():
    both = [{ACTOR: size, REF: size} for size in (2, 4, 8)]

    assert sizes_of(on_gpus(gpus=16)) == both  # of 16 ranks and 24 experts
    assert sizes_of(on_gpus(gpus=16), at_most=4) == both[:2]
    assert sizes_of(on_gpus(gpus=6)) == [{ACTOR: size, REF: size} for size in (2, 3, 6)]
    assert sizes_of(on_gpus({"worker.actor.fsdp.fsdp_size": 4}))[-1] == {REF: 8}
    assert sizes_of(on_gpus({ACTOR: 4})) == [{ACTOR: 1}, {ACTOR: 2, REF: 2}, {REF: 4}, {ACTOR: 8, REF: 8}]


def test_experts_that_stay_whole_get_no_size():
    def with_biases(*args, **kwargs):
        return replace(read_mixture(*args, **kwargs), has_expert_biases=True)

    muon = on_gpus({"worker.actor.optim.strategy": "muon"})
    assert sizes_of(on_gpus(), read_shape) == []  # a dense model
    assert sizes_of(muon)[0] == {ACTOR: 2, REF: 2}
    assert sizes_of(muon, with_biases) == [{REF: size} for size in (2, 4, 8)]


@pytest.mark.parametrize(("missing", "size"), [(1, 2), (7, 2), (10, 4), (11.3, 8)])
def test_a_pass_that_does_not_fit_is_helped_by_the_fewest_ranks_that_hold_its_experts(missing, size):
    # A pass holds three copies of a layer in two bytes, 13.5 GiB, or with divided experts two copies of
    # these: 4.5, 2.5 or 1.5 GiB with 2, 4 or 8 ranks.
    config = on_gpus()
    phase = next(
        each for each in Planner(planned_ppo, read_mixture, GPU)(config).phases if each.name == "old"
    )
    usable = phase.device_bytes - missing * GIB
    small = Planner(planned_ppo, read_mixture, replace(GPU, device_bytes=int(usable / 0.9) + 1))

    assert remedy(config, phase, small) == {ACTOR: size, REF: size}


@pytest.mark.parametrize(("rows", "choices", "expected"), [(1, 2, {ACTOR: 8, REF: 8}), (32, 16, None)])
def test_a_size_is_advised_where_weights_take_longer_than_tokens(rows, choices, expected):
    # Of the 4 Gi weights of experts a GPU receives 7/8 in each micro batch of an update, twice in two bytes
    # and once as gradients in four, 28 GiB; and of their tokens' states 3 x 2 layers x 2 directions x choices
    # x 4096 numbers of two bytes, also 7/8: 0.33 GiB for one row of 2,048 tokens with 2 choices, 42 GiB for
    # the 16 rows with 16 choices that each of two micro batches has.
    def read(*args, **kwargs):
        shape = read_mixture(*args, **kwargs)
        return replace(shape, text=replace(shape.text, choices=choices))

    sizes = {
        "data.rollout_batch_size": 64,
        "worker.actor.global_batch_size": 64,
        "worker.actor.micro_batch_size_per_device_for_update": rows,
        "worker.actor.micro_batch_size_per_device_for_experience": rows,
    }
    node = parse_cluster("8xL40S")
    plan = Planner(planned_ppo, read, replace(node.machine, device_bytes=1 << 50))
    predict = Predictor(plan, node, mean_prompt=1024, mean_response=1024)

    found = advise(on_gpus(sizes), predict)
    assert next((each.changes for each in found if ACTOR in each.changes), None) == expected
