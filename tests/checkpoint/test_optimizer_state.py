# SPDX-License-Identifier: Apache-2.0
"""Every optimizer computes the same on any number of ranks, and goes on as if it had not stopped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from tests.helpers.optimizers import (
    IN_BF16,
    MARKED_STRATEGIES,
    STRATEGIES,
    Parameters,
    has_torchao,
    shard,
    update,
    whole,
    whole_values,
)
from verl.checkpoint.sharded import load_shards
from verl.config.model import OptimConfig
from verl.distributed.fsdp import local_part, make_mesh
from verl.distributed.offload import Offloader
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler

HERE = [strategy for strategy in STRATEGIES if strategy != "adamw_8bit" or has_torchao()]
FACTORS = {"wide": 10.0, "embed": 0.5}


def make_parts(strategy: str, fsdp_size: int | None = -1, factors: dict[str, float] = FACTORS) -> tuple:
    """Model, optimizer and schedule; `fsdp_size` None does not shard the model."""
    model = Parameters(torch.bfloat16 if strategy in IN_BF16 else torch.float32)
    if fsdp_size is not None:
        shard(model, make_mesh(dist.get_world_size(), fsdp_size, "cpu"))
    config = OptimConfig(
        lr=1e-2, strategy=strategy, lr_factors=factors, lr_scheduler_type="wsd", lr_decay_ratio=0.5
    )
    optimizer = build_optimizer(model, config)
    return model, optimizer, build_scheduler(optimizer, config, 6)


def on_two(rank: int, world_size: int, target: Path) -> dict[str, Any]:
    """Four steps with a checkpoint after two; the same resumed; and two replicas of the model."""
    seen: dict[str, Any] = {}
    for strategy in HERE:
        torch.manual_seed(rank)  # as in a worker: each rank has its own
        parts = make_parts(strategy)
        update(*parts, range(2))
        save_shards(target / strategy, *parts)
        update(*parts, range(2, 4))
        torch.manual_seed(7)
        resumed = make_parts(strategy)
        offloader = Offloader(
            resumed[0], "cpu", optimizer=resumed[1], offloads_weights=True, offloads_state=True
        )
        with offloader.loaded():
            pass
        load_shards(target / strategy, *resumed)
        offloader.settle()
        torch.manual_seed(8)  # what else a run draws must not matter
        for step in (2, 3):
            with offloader.loaded(with_optimizer=True):
                update(*resumed, range(step, step + 1))
        torch.manual_seed(rank)
        copies = make_parts(strategy, fsdp_size=1)
        update(*copies, range(4))
        seen[strategy] = {
            "unbroken": whole_values(parts[0]),
            "resumed": whole_values(resumed[0]),
            "copy": {name: local_part(param).tolist() for name, param in copies[0].named_parameters()},
        }
    with pytest.raises(ValueError) as error:
        load_shards(target / "adamw", *make_parts("muon"))
    return seen | {"error": str(error.value)}


def on_one(source: Path) -> dict[str, Any]:
    """Two more steps from the checkpoint of two ranks; and what it gives to a run with other groups."""
    seen = {}
    for strategy in HERE:
        resumed = make_parts(strategy)
        load_shards(source / strategy, *resumed)
        update(*resumed, range(2, 4))
        seen[strategy] = whole_values(resumed[0])
    same, other = make_parts("adamw"), make_parts("adamw", factors={"norm|bias": 3.0})
    for parts in (same, other):
        load_shards(source / "adamw", *parts)
    moments = [
        {
            name: whole(parts[1].state[param]["exp_avg"]).tolist()
            for name, param in parts[0].named_parameters()
        }
        for parts in (same, other)
    ]
    rates = [[group["lr"] for group in parts[1].param_groups] for parts in (same, other)]
    return seen | {"moments": moments, "rates": rates}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[dict]]:
    target = tmp_path_factory.mktemp("two")
    return target, run_distributed(on_two, 2, target)


@pytest.fixture(scope="module")
def one(two, tmp_path_factory) -> Iterator[dict]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("one") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield on_one(two[0])
    finally:
        dist.destroy_process_group()


def on_a_plain_model(strategy: str) -> dict[str, list]:
    parts = make_parts(strategy, fsdp_size=None)
    update(*parts, range(4))
    return whole_values(parts[0])


@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_a_resumed_run_repeats_the_uninterrupted_updates_bit_for_bit(two, strategy):
    for seen in two[1]:
        assert seen[strategy]["resumed"] == seen[strategy]["unbroken"]


@pytest.mark.parametrize("strategy", [one for one in MARKED_STRATEGIES if "adamw_bf16_sr" not in one.values])
def test_updates_do_not_depend_on_the_number_of_ranks(two, one, strategy):
    plain = on_a_plain_model(strategy)

    for found in (two[1][0][strategy]["unbroken"], one[strategy]):
        for name, expected in plain.items():
            torch.testing.assert_close(
                torch.tensor(found[name]), torch.tensor(expected), atol=1e-6, rtol=0, msg=name
            )


@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_replicas_of_a_model_stay_equal(two, strategy):
    first, second = (seen[strategy]["copy"] for seen in two[1])

    assert first == second


def test_stochastic_rounding_on_other_ranks_differs_only_by_rounding(two, one):
    # Two more updates with random parts below half a step of bfloat16 each, of weights below 8.
    for name, expected in two[1][0]["adamw_bf16_sr"]["unbroken"].items():
        difference = (torch.tensor(one["adamw_bf16_sr"][name]) - torch.tensor(expected)).abs().max()
        assert difference <= 2 * 2**-5, name


def test_new_parameter_groups_keep_the_moments_and_have_their_own_rates(one):
    # Half of six steps fall by 1 - sqrt(progress); after two steps the rate is still the peak.
    assert one["moments"][0] == one["moments"][1]
    assert one["rates"] == [[0.01, 0.1, 0.005], [0.01, 0.03]]


def test_the_state_of_another_optimizer_is_refused(two):
    for seen in two[1]:
        assert "holds the state of AdamW, which `worker.adamw.optim.strategy` (Muon)" in seen["error"]
