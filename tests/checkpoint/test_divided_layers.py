# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of divided layers are those of whole ones: any layout continues any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from tests.helpers.optimizers import IN_BF16, update, whole_values
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import load_shards, save_huggingface_files
from verl.config.model import FSDPConfig, ModelConfig, OptimConfig
from verl.config.rules.tensor_parallel_rules import OPTIMIZERS
from verl.distributed.fsdp import make_mesh
from verl.distributed.offload import Offloader
from verl.models.tiny import save_tiny_model
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler
from verl.workers.model_builder import build_model

pytestmark = pytest.mark.heavy

STRATEGIES = [name for name in OPTIMIZERS if name != "adamw_bf16_sr"]  # draws other numbers for other shards
SIZES = (1, 2)


def make_parts(folder: Path, strategy: str, size: int) -> tuple[Any, Any, Any]:
    """Model, optimizer and schedule, with the layers divided over `size` ranks."""
    model = build_model(
        ModelConfig(str(folder)),
        FSDPConfig(torch_dtype="bf16" if strategy in IN_BF16 else "fp32", mp_param_dtype="fp32"),
        mesh=make_mesh(dist.get_world_size(), -1, "cpu", size),
        device="cpu",
        trainable=True,
    )
    config = OptimConfig(lr=1e-2, strategy=strategy, lr_scheduler_type="wsd", lr_decay_ratio=0.5)
    optimizer = build_optimizer(model, config)
    return model, optimizer, build_scheduler(optimizer, config, 6)


def trained(rank: int, world_size: int, folder: Path, target: Path) -> dict[str, Any]:
    """Four steps of each optimizer and layout, with a checkpoint after two."""
    found = {}
    for strategy in STRATEGIES:
        for size in SIZES:
            parts = make_parts(folder, strategy, size)
            update(*parts, range(2))
            path = target / strategy / str(size)
            save_shards(path, *parts)
            if rank == 0:
                save_huggingface_files(path, parts[0].config, parts[0].generation_config)
            update(*parts, range(2, 4))
            found[strategy, size] = whole_values(parts[0])
    return found


def continued(
    rank: int, world_size: int, folder: Path, source: Path, cases: list[tuple[int, int]]
) -> dict[tuple[str, int, int], Any]:
    """Two more steps from the checkpoint of each optimizer, in other layouts, offloaded between them."""
    found = {}
    for saved, size in cases:
        for strategy in STRATEGIES:
            parts = make_parts(folder, strategy, size)
            offloader = Offloader(
                parts[0], "cpu", optimizer=parts[1], offloads_weights=True, offloads_state=True
            )
            load_shards(source / strategy / str(saved), *parts)
            offloader.settle()
            for step in (2, 3):
                with offloader.loaded(with_optimizer=True):
                    update(*parts, range(step, step + 1))
            found[strategy, saved, size] = whole_values(parts[0])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory) -> tuple[Path, dict]:
    target = tmp_path_factory.mktemp("two")
    return target, run_distributed(trained, 2, folder, target)[0]


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), atol=1e-6, rtol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_optimizer_updates_divided_layers_as_whole_ones(two, strategy):
    assert_same(two[1][strategy, 2], two[1][strategy, 1])


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, [(2, 1)], id="one rank", marks=pytest.mark.nightly("verl/checkpoint")),
        pytest.param(2, [(2, 1), (1, 2)], id="two ranks"),
        pytest.param(
            4,
            [(2, 2), (1, 2), (2, 1)],
            id="four ranks",
            marks=pytest.mark.nightly("verl/checkpoint"),
        ),
    ],
)
def test_any_layout_continues_the_checkpoint_of_any_other_as_if_it_had_not_stopped(
    two, folder, world_size, cases
):
    target, unbroken = two

    for found in run_distributed(continued, world_size, folder, target, cases):
        for (strategy, saved, _), values in found.items():
            assert_same(values, unbroken[strategy, saved])


def test_merged_folders_of_both_layouts_have_the_same_weights(two):
    merged = [merge_checkpoint(two[0] / "adamw" / str(size)) for size in SIZES]

    whole, divided = (load_file(folder / "model.safetensors") for folder in merged)
    assert whole.keys() == divided.keys()
    assert all(torch.equal(divided[name], tensor) for name, tensor in whole.items())
