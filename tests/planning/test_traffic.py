# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank of a small mixture receives, counted by hand."""

from dataclasses import replace

import pytest

from verl.planning.layer_sizes import Stack
from verl.planning.memory_model import ModelSetup, ModelShape
from verl.planning.speed.operations import collectives
from verl.planning.speed.workload import PassWork

# Two layers of 100 weights, 80 of them experts, and 60 outside; tokens have two choices and states of 4.
STACK = Stack(
    layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, params=100, experts=80, choices=2
)
SHAPE = ModelShape(
    params=260, stored=1040, trained=260, trained_stored=1040, root=60, trained_root=60, largest_stored=160,
    vocab=10, is_tied=True, text=STACK, experts=160, trained_experts=160,
)  # fmt: skip
WORK = PassWork(tokens=30, responses=20, pairs=0, patches=0, images=0, micro_batches=1, repeats=1)
WHOLE, DIVIDED = (ModelSetup("cuda", ranks=8, c=2, expert_ranks=size) for size in (1, 4))


def test_a_rank_receives_its_part_of_divided_experts_and_all_of_the_rest():
    whole, divided = (collectives(SHAPE, setup, WORK, is_update=False) for setup in (WHOLE, DIVIDED))

    assert whole.sharding == pytest.approx(2 * 260 * 7 / 8)
    assert divided.sharding == pytest.approx(2 * 100 * 7 / 8)
    assert divided.expert_sharding == pytest.approx(2 * 160 / 4 * 1 / 2)  # from one other rank


def test_tokens_travel_to_their_experts_and_back():
    forward = collectives(SHAPE, DIVIDED, WORK, is_update=False)
    update = collectives(SHAPE, DIVIDED, WORK, is_update=True)

    # Layers, both ways, tokens, choices, states of two bytes; a quarter stays.
    assert forward.experts == pytest.approx(2 * 2 * 30 * 2 * 4 * 2 * 3 / 4)
    assert update.experts == 3 * forward.experts  # recomputed, and their gradients
    assert collectives(SHAPE, WHOLE, WORK, is_update=True).experts == 0


def test_gradients_of_divided_experts_are_summed_over_the_ranks_that_hold_them():
    update = collectives(SHAPE, DIVIDED, WORK, is_update=True)

    gathered = 2 * (40 * 7 / 8 * 2 + 60 * 7 / 8)  # layers twice, the root once
    assert update.sharding == pytest.approx(gathered + 4 * 100 * 7 / 8)
    assert update.expert_sharding == pytest.approx((2 * 2 + 4) * 160 / 4 * 1 / 2)


def test_copies_sum_gradients_once_in_an_optimizer_step_or_for_each_micro_batch():
    work = replace(WORK, micro_batches=6, repeats=2)  # two steps of three
    once, each = (
        collectives(SHAPE, replace(WHOLE, reduces_once=is_once), work, is_update=True, copies=4)
        for is_once in (True, False)
    )

    # A rank's shard in float32 travels around a ring twice, without its own part.
    assert once.replicas == pytest.approx(2 * (2 * 4 * 260 / 8 * 3 / 4))
    assert each == replace(once, replicas=3 * once.replicas)


def test_ranks_that_share_layers_sum_the_states_of_all_tokens():
    dense = replace(SHAPE, text=replace(STACK, experts=0, choices=0), experts=0, trained_experts=0)
    setup = ModelSetup("cuda", ranks=4, c=2, layer_ranks=2)
    forward, update = (collectives(dense.part(2), setup, WORK, is_update=update) for update in (False, True))

    # States of 4 in two bytes travel around a ring of two twice, without a rank's own half: after attention,
    # MLP and embedding; their gradients, of the head's 20 rows too; and after attention in a block that is
    # computed again.
    state = 2 * 4 * 2 / 2
    assert forward.sums == pytest.approx((2 * 2 + 1) * 30 * state)
    assert update.sums == pytest.approx(((2 * 2 + 1 + 2 * 2 + 2) * 30 + 20) * 2 * 4)
    assert forward.sharding == pytest.approx(2 * 130 * 3 / 4)
    assert collectives(dense, WHOLE, WORK, is_update=True).sums == 0
