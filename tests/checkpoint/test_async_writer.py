# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written behind the training hold what was there when they began; what fails is known to all."""

import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_sharded import make_trainer, train
from tests.helpers.distributed import run_distributed
from verl.checkpoint.manifest import read_manifest, write_manifest
from verl.checkpoint.sharded import AsyncWriter, NotWrittenError, load_shards, take_snapshot, write_snapshot
from verl.models.tiny import save_tiny_model

LIMIT_S = 120


def weights(trainer) -> list[torch.Tensor]:
    return [param.to_local().detach().clone() for param in trainer.model.parameters()]


def train_while_saving(rank: int, world_size: int, model: Path, target: Path) -> bool:
    """Save, go on at once, and compare what the file holds with the weights of that moment."""
    trainer = make_trainer(model)
    train(trainer, 2)
    writer, before = AsyncWriter(), weights(trainer)
    writer.start(target / "step", {"actor": take_snapshot(*trainer, copies=True)})
    expected = train(trainer, 2)
    deadline = time.monotonic() + LIMIT_S
    while not writer.is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert writer.finish() is None and writer.finish() is None
    changed = not any(torch.equal(*pair) for pair in zip(before, weights(trainer), strict=True))

    restored = make_trainer(model)
    load_shards(target / "step" / "actor", *restored)
    same = all(torch.equal(*pair) for pair in zip(before, weights(restored), strict=True))
    return changed and same and train(restored, 2) == expected


def problems(rank: int, world_size: int, model: Path, target: Path) -> list[str]:
    """Errors on each rank: a file that one rank cannot write, and one with a flipped bit."""
    trainer = make_trainer(model)
    told = []
    for blocked in ("rank_1.pt", "manifest.json.tmp"):
        (target / blocked / "actor" / blocked).mkdir(parents=True, exist_ok=True)
        writer = AsyncWriter()
        writer.start(target / blocked, {"actor": take_snapshot(*trainer)})
        told.append(writer.finish())
    (target / "file").touch()
    with pytest.raises(NotWrittenError) as caught:
        write_snapshot(target / "file" / "actor", take_snapshot(*trainer))
    told.append(str(caught.value))
    write_snapshot(target / "flipped", take_snapshot(*trainer))
    if rank == 0:
        flip(target / "flipped" / "__1_0.distcp")
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="sha256") as damaged:
        load_shards(target / "flipped", *trainer)
    return [*told, str(damaged.value)]


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def work(rank: int, world_size: int, model: Path, target: Path) -> tuple[bool, list[str]]:
    is_same = train_while_saving(rank, world_size, model, target)
    return is_same, problems(rank, world_size, model, target)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    return run_distributed(work, 2, model, tmp_path_factory.mktemp("saved"))


@pytest.mark.nightly
def test_a_background_save_holds_the_state_at_its_start(seen):
    assert [is_same for is_same, _ in seen] == [True, True]


@pytest.mark.nightly
def test_a_write_error_reaches_every_rank(seen):
    (_, first), (_, second) = seen

    assert first[:3] == second[:3]
    assert "rank 1: IsADirectoryError" in first[0] and "rank 0" not in first[0]
    assert "rank 0: IsADirectoryError" in first[1] and "manifest.json.tmp" in first[1]
    assert "rank 0: NotADirectoryError" in first[2]


@pytest.mark.nightly
def test_a_flipped_bit_is_an_error_on_every_rank_that_names_the_file(seen):
    (_, first), (_, second) = seen

    assert first[3] == second[3]
    assert "__1_0.distcp has changed since it was written (sha256); the checkpoint is damaged" in first[3]


def test_a_file_of_the_wrong_size_is_an_error_that_names_a_complete_step(tmp_path):
    for step in (1, 2, 3, 4):
        actor = tmp_path / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "shard").write_text("weights")
        write_manifest(actor, {})
        write_manifest(actor.parent, {})
    for step in (3, 4):
        (tmp_path / f"global_step_{step}" / "actor" / "shard").write_text("weight")

    with pytest.raises(ValueError, match=r"6 bytes instead of 7.*load_checkpoint_path=.*_2`"):
        read_manifest(tmp_path / "global_step_4" / "actor")
