# SPDX-License-Identifier: Apache-2.0
"""An interrupted run computes the same numbers after it resumes, also on another number of processes."""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from verl.checkpoint.manifest import MANIFEST, read_manifest
from verl.checkpoint.sharded import (
    load_shards,
)
from verl.config.model import FSDPConfig, ModelConfig, OptimConfig
from verl.distributed.fsdp import clip_grad_norm, make_mesh
from verl.models.monkey_patch import plain_attention
from verl.models.tiny import save_tiny_model
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler
from verl.workers.model_builder import build_model

pytestmark = pytest.mark.heavy

OPTIM = OptimConfig(lr=1e-3, lr_warmup_steps=3, lr_scheduler_type="cosine")


class Trainer(NamedTuple):
    """One role's training state."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def make_trainer(folder: Path, optim: OptimConfig = OPTIM) -> Trainer:
    mesh = make_mesh(dist.get_world_size(), -1, "cpu")
    fsdp = FSDPConfig(mp_param_dtype="fp32", torch_dtype="bf16" if optim.strategy == "adamw_bf16" else "fp32")
    model = build_model(ModelConfig(model_path=str(folder)), fsdp, mesh=mesh, device="cpu", trainable=True)
    optimizer = build_optimizer(model, optim)
    return Trainer(model, optimizer, build_scheduler(optimizer, optim, 10))


def train(trainer: Trainer, steps: int) -> list[float]:
    """Steps on four rows, split over the ranks; returns the loss over all rows before each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = torch.randint(10, 200, (4, 12), generator=torch.Generator().manual_seed(1))[rank::world_size]
    losses = []
    for _ in range(steps):
        with plain_attention(trainer.model):
            logits = trainer.model(
                input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False
            ).logits
            taken = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, rows[:, 1:, None])
            loss = -taken.mean() * rows.shape[0] * world_size / 4
            loss.backward()
        clip_grad_norm(trainer.model, 1.0)
        trainer.optimizer.step()
        trainer.scheduler.step()
        trainer.optimizer.zero_grad()
        total = loss.detach() / world_size
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def save_and_go_on(rank: int, world_size: int, folder: Path, target: Path) -> dict[str, list[float]]:
    """Two steps, a checkpoint, two more steps; for both optimizers, and once with weights only."""
    losses = {}
    for strategy in ("adamw", "adamw_bf16"):
        trainer = make_trainer(folder, OptimConfig(lr=1e-3, lr_warmup_steps=3, strategy=strategy))
        train(trainer, 2)
        save_shards(target / strategy, *trainer, extra={"draws": torch.tensor([rank, 7]), "note": "engine"})
        losses[strategy] = [*train(trainer, 2), random.random(), torch.rand(1).item()]
    model, optimizer, scheduler = make_trainer(folder)
    train(Trainer(model, optimizer, scheduler), 2)
    save_shards(target / "weights_only", model, None, scheduler)
    return losses


def go_on(
    rank: int, world_size: int, folder: Path, source: Path, strategies: tuple[str, ...]
) -> dict[str, object]:
    seen = {}
    for strategy in strategies:
        trainer = make_trainer(folder, OptimConfig(lr=1e-3, lr_warmup_steps=3, strategy=strategy))
        extra = load_shards(source / strategy, *trainer)
        seen[strategy] = [*train(trainer, 2), random.random(), torch.rand(1).item()]
        seen["extra"] = extra and (extra["draws"].tolist(), extra["note"])
    trainer = make_trainer(folder)
    load_shards(source / "weights_only", *trainer)
    seen["weights_only"] = len(trainer.optimizer.state), trainer.scheduler.last_epoch
    seen["first_loss"] = train(trainer, 1)[0]
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def on_one_process(
    rank: int, world_size: int, folder: Path, source: Path, target: Path, broken: dict
) -> dict:
    """Go on from two processes' checkpoint, save one of one process, and look at what is refused."""
    return {
        "from_two": go_on(rank, world_size, folder, source, ("adamw",)),
        "unbroken": save_and_go_on(rank, world_size, folder, target),
        "errors": [load_error(model, path) for path, model in broken.items()],
    }


def on_two_processes(rank: int, world_size: int, folder: Path, two: Path, one: Path) -> dict[str, dict]:
    return {
        "from_two": go_on(rank, world_size, folder, two, STRATEGIES),
        "from_one": go_on(rank, world_size, folder, one, ("adamw",)),
    }


def load_error(model: Path, path: Path) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_shards(path, *make_trainer(model))
    return str(caught.value)


@pytest.fixture(scope="module")
def saved_by_two(folder, tmp_path_factory) -> tuple[Path, list[dict]]:
    target = tmp_path_factory.mktemp("two")
    return target, run_distributed(save_and_go_on, 2, folder, target)


STRATEGIES = ("adamw", "adamw_bf16")


@pytest.fixture(scope="module")
def broken(folder, saved_by_two, tmp_path_factory) -> dict[Path, Path]:
    """Checkpoints that cannot be loaded, and the models they are loaded into."""
    root, (source, _) = tmp_path_factory.mktemp("broken"), saved_by_two
    damaged, foreign = root / "damaged", root / "foreign"
    damaged.mkdir()
    for file in (source / "adamw").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    shard = damaged / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    foreign.mkdir()
    (foreign / "model_world_size_1_rank_0.pt").write_text("")
    other = save_tiny_model(root / "other", intermediate_size=192)
    return {source / "adamw": other, damaged: folder, foreign: folder}


@pytest.fixture(scope="module")
def one_process(folder, saved_by_two, broken, tmp_path_factory) -> tuple[Path, dict]:
    target = tmp_path_factory.mktemp("one")
    [seen] = run_distributed(on_one_process, 1, folder, saved_by_two[0], target, broken)
    return target, seen


@pytest.fixture(scope="module")
def two_processes(folder, saved_by_two, one_process) -> list[dict]:
    return run_distributed(on_two_processes, 2, folder, saved_by_two[0], one_process[0])


def test_two_processes_resume_exactly(saved_by_two, two_processes):
    _, unbroken = saved_by_two

    for rank, seen in enumerate(process["from_two"] for process in two_processes):
        for strategy in STRATEGIES:
            assert seen[strategy] == unbroken[rank][strategy]  # losses and the next random numbers, exactly
        assert seen["extra"] == ([rank, 7], "engine")


def test_a_checkpoint_of_weights_only_starts_with_an_empty_optimizer(saved_by_two, two_processes):
    _, unbroken = saved_by_two

    for seen in (process["from_two"] for process in two_processes):
        assert seen["weights_only"] == (0, 2)  # no state, at step 2 of the schedule
        np.testing.assert_allclose(seen["first_loss"], unbroken[0]["adamw"][0], rtol=1e-6)


def test_one_process_resumes_the_checkpoint_of_two(saved_by_two, one_process):
    seen = one_process[1]["from_two"]

    np.testing.assert_allclose(seen["adamw"][:2], saved_by_two[1][0]["adamw"][:2], rtol=1e-6)
    assert seen["extra"] is None  # random generators belong to a rank


def test_two_processes_resume_the_checkpoint_of_one(one_process, two_processes):
    unbroken = one_process[1]["unbroken"]

    for seen in (process["from_one"] for process in two_processes):
        np.testing.assert_allclose(seen["adamw"][:2], unbroken["adamw"][:2], rtol=1e-6)


def test_damaged_and_mismatched_checkpoints_are_refused(one_process, broken):
    unfitting, damaged, foreign = one_process[1]["errors"]

    assert "a different model" in unfitting
    assert "mlp.down_proj.weight: (128, 256) in the checkpoint, (128, 192) in the model" in unfitting
    assert str(list(broken)[1] / "__1_0.distcp") in damaged
    assert "damaged" in damaged and "trainer.load_checkpoint_path" in damaged
    assert "scripts/model_merger.py" in foreign


def test_a_folder_without_its_manifest_or_a_file_is_incomplete(saved_by_two, tmp_path):
    source, _ = saved_by_two
    for file in (source / "adamw").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rank_1.pt").unlink()

    with pytest.raises(FileNotFoundError, match=r"rank_1\.pt is missing"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match="not complete"):
        read_manifest(tmp_path)
