# SPDX-License-Identifier: Apache-2.0
"""A rank's whole step on a virtual GPU: every role, kind of model, optimizer and kind of sharding."""

import pytest

from tests.virtual.checks import different_order, problems
from tests.virtual.shapes import Setup

ALL_ROLES = Setup(reference=True, critic=True, prime=True, reward_model=True, updates=1)
MIXED = (100, 300, 512, 1)  # lengths of responses
STEPS = {
    "one rank": ("tiny", Setup(), 1),
    "all roles": ("tiny", ALL_ROLES, 8),
    "1,024 ranks": ("tiny", Setup(reference=True, updates=1), 1024),
    "hybrid shards": ("tiny", Setup(fsdp_size=8, optimizer="adamw_bf16", dtype="bf16"), 64),
    "muon": ("tiny", Setup(optimizer="muon"), 2),
    "offloaded": ("tiny", Setup(offload=True, reference=True), 8),
    "shards in host memory": ("tiny", Setup(cpu_offload=True, offload=True), 8),
    "adapters": ("tiny", Setup(lora_rank=8, reference=True, updates=1), 8),
    "ulysses and ring": ("tiny", Setup(ulysses=2, ring=2, response_lengths=MIXED, updates=1), 8),
    "experts": ("tiny-moe", Setup(updates=1), 8),
    "divided experts": ("tiny-moe", Setup(updates=1, expert_parallel=4, fsdp_size=8), 16),
    "divided layers": (
        "tiny",
        Setup(tensor_parallel=2, fsdp_size=4, reference=True, critic=True, offload=True),
        8,
    ),
    "latent attention": ("tiny-latent", Setup(updates=1, expert_parallel=4), 8),
    "images": ("tiny-vl", Setup(images=(1, 0), image_size=(56, 56), updates=1), 8),
    "fine-tuning": ("tiny", Setup(fine_tuning=True, responses=1, response_lengths=MIXED, updates=1), 4),
}
QUICK = ("all roles", "images")  # the others are slow


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly("verl/workers", "verl/models", "verl/distributed"))
        for name in ("all roles", "images")
    ]
    + [pytest.param(name, marks=pytest.mark.slow) for name in STEPS if name not in QUICK],
)
def test_a_step_runs_on_a_gpu_without_waiting_for_it(cluster, name):
    shape, setup, ranks = STEPS[name]

    phases = cluster.measure(shape, setup, ranks)

    assert problems(phases) == []
    update = phases["update_actor"]
    assert update.total_flops > 0 and update.peak > update.start
    sent = {name for name, *_ in update.collectives}
    assert ranks == 1 or {"_allgather_base_", "_reduce_scatter_base_"} <= sent


# Other lengths, and a rank without images: rows differ between ranks, collectives must not.
PAIRS = {
    "text": ("tiny", {}, {}),
    "ulysses and ring": ("tiny", {"ulysses": 2, "ring": 2}, {}),
    "images on one rank": ("tiny-vl", {"images": (1, 1), "image_size": (56, 56)}, {"images": (0, 0)}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ulysses and ring", marks=pytest.mark.nightly("verl/workers", "verl/distributed")),
        pytest.param("images on one rank", marks=pytest.mark.nightly("verl/workers")),
        pytest.param("text", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_other_rows_issue_the_same_collectives(cluster, name):
    shape, options, others = PAIRS[name]

    first, second = (
        cluster.measure(
            shape, Setup(updates=1, rank=rank, response_lengths=lengths, rows_at_once=8, **given), 8
        )
        for rank, lengths, given in ((0, (512, 300), options), (5, (20, 77), options | others))
    )

    assert different_order(first, second) is None
