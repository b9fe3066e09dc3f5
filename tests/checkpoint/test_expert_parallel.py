# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of divided experts are those of undivided ones: any layout continues any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from tests.helpers.optimizers import IN_BF16, STRATEGIES, has_torchao, update, whole_values
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import load_shards, save_huggingface_files
from verl.config.model import FSDPConfig, ModelConfig, OptimConfig
from verl.distributed.fsdp import make_mesh, sharded_parameters
from verl.distributed.offload import Offloader
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.tiny import save_tiny_model
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler
from verl.workers.model_builder import build_model

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/models/mixture", "verl/optim", "verl/distributed")]

# Stochastic rounding draws other numbers for other shards.
HERE = [name for name in STRATEGIES if name != "adamw_bf16_sr" and (name != "adamw_8bit" or has_torchao())]
UNDIVIDED, DIVIDED = "undivided", "divided"
SIZES = {UNDIVIDED: 1, DIVIDED: 2}


def make_parts(folder: Path, strategy: str, size: int) -> tuple[Any, Any, Any]:
    """Model, optimizer and schedule, with the experts divided over `size` ranks."""
    dtype = "bf16" if strategy in IN_BF16 else "fp32"
    model = build_model(
        ModelConfig(str(folder)),
        FSDPConfig(torch_dtype=dtype, expert_parallel_size=size),
        mesh=make_mesh(dist.get_world_size(), -1, "cpu"),
        device="cpu",
        trainable=True,
    )
    config = OptimConfig(lr=1e-2, strategy=strategy, lr_scheduler_type="wsd", lr_decay_ratio=0.5)
    optimizer = build_optimizer(model, config)
    return model, optimizer, build_scheduler(optimizer, config, 6)


def trained(rank: int, world_size: int, folder: Path, target: Path) -> dict[str, Any]:
    """Four steps of each optimizer and layout, with a checkpoint after two."""
    found = {}
    for strategy in HERE:
        for layout, size in SIZES.items():
            parts = make_parts(folder, strategy, size)
            update(*parts, range(2))
            path = target / strategy / layout
            save_shards(path, *parts)
            if rank == 0:
                save_huggingface_files(path, parts[0].config, parts[0].generation_config)
            update(*parts, range(2, 4))
            found[strategy, layout] = whole_values(parts[0])
    return found


def continued(
    rank: int, world_size: int, folder: Path, source: Path, cases: list[tuple[str, int]]
) -> dict[tuple[str, str, int], Any]:
    """Two more steps from the checkpoint of each optimizer, in other layouts, offloaded between them."""
    found = {}
    for layout, size in cases:
        for strategy in HERE:
            parts = make_parts(folder, strategy, size)
            offloader = Offloader(
                parts[0], "cpu", optimizer=parts[1], offloads_weights=True, offloads_state=True
            )
            load_shards(source / strategy / layout, *parts)
            offloader.settle()
            for step in (2, 3):
                with offloader.loaded(with_optimizer=True):
                    update(*parts, range(step, step + 1))
            found[strategy, layout, size] = whole_values(parts[0])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=1)


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory) -> tuple[Path, dict]:
    target = tmp_path_factory.mktemp("two")
    return target, run_distributed(trained, 2, folder, target)[0]


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), atol=1e-6, rtol=0)


@pytest.mark.parametrize("strategy", HERE)
def test_every_optimizer_updates_divided_experts_as_undivided_ones(two, strategy):
    assert_same(two[1][strategy, DIVIDED], two[1][strategy, UNDIVIDED])


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, [(DIVIDED, 1)], id="one rank", marks=pytest.mark.slow),
        pytest.param(2, [(DIVIDED, 1), (UNDIVIDED, 2)], id="two ranks"),
        pytest.param(4, [(DIVIDED, 4), (UNDIVIDED, 2)], id="four ranks", marks=pytest.mark.slow),
    ],
)
def test_any_layout_continues_the_checkpoint_of_any_other_as_if_it_had_not_stopped(
    two, folder, world_size, cases
):
    target, unbroken = two

    for found in run_distributed(continued, world_size, folder, target, cases):
        for (strategy, layout, _), values in found.items():
            assert_same(values, unbroken[strategy, layout])


def test_merged_folders_of_both_layouts_are_equal_byte_for_byte(two):
    merged = [merge_checkpoint(two[0] / "adamw" / layout) for layout in SIZES]

    names = [sorted(file.name for file in folder.iterdir()) for folder in merged]
    assert names[0] == names[1] and "model.safetensors" in names[0]
    for name in names[0]:
        assert (merged[0] / name).read_bytes() == (merged[1] / name).read_bytes(), name


def held(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Experts on this rank, and whether all weights arrive whole."""
    model = make_parts(folder, "adamw", 2)[0]
    parts = {name: param for name, param in sharded_parameters(model).items() if ".experts." in name}
    assert all(isinstance(param, DTensor) for param in parts.values())
    whole = dict(full_named_tensors(model))
    return {
        "rows": {name: len(param.to_local()) for name, param in parts.items()},
        "equal": all(
            torch.equal(param.to_local(), whole[name][[2 * (rank % 2) + rank // 2]])
            for name, param in parts.items()
        ),
    }


@pytest.mark.slow
def test_a_rank_holds_its_share_of_its_experts(folder):
    # Four experts: ranks 0 and 2 have the first two, one each, ranks 1 and 3 the others.
    for found in run_distributed(held, 4, folder):
        assert set(found["rows"].values()) == {1}
        assert found["equal"]
