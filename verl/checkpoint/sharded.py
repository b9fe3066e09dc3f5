# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of one role's training state: weights, optimizer, schedule, random generators.

```
actor/manifest.json       sizes and digests of all files, the schedule; written last
actor/.metadata           of the shards (torch.distributed.checkpoint)
actor/__R_N.distcp        weights and optimizer, sharded; any world size loads them
actor/rank_R.pt           random generators and extra state of rank R
actor/huggingface/        config, tokenizer, processor; `scripts/model_merger.py` adds weights
actor/lora_adapter/       LoRA adapters in peft's format; the shards then omit the base
```
"""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.checkpoint.manifest import (
    BASE_MODEL,
    FileEntry,
    check_digests,
    file_entries,
    read_manifest,
    write_manifest,
)
from verl.checkpoint.storage import ShardReader, read_tensors
from verl.distributed.device import random_state, set_random_state
from verl.distributed.fsdp import persistent_buffers, sharded_parameters, zeros_sharded_like
from verl.models.lora_weights import tensors_to_save
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

HUGGINGFACE, LORA_ADAPTER = "huggingface", "lora_adapter"
PATIENCE = timedelta(hours=12)  # that ranks wait for the slowest disk


class Savable(Protocol):
    """A tokenizer, a processor or a config of transformers."""

    def save_pretrained(self, save_directory: str | Path) -> Any: ...


class Snapshot(NamedTuple):
    """One rank's part of the training state of a model, ready to be written."""

    tensors: dict[str, Tensor]  # weights and optimizer state, sharded as in the model
    rank_state: dict[str, Any]  # random generators and extra state
    manifest: dict[str, Any]
    files: tuple[Savable | None, ...]  # for `huggingface/`, of rank 0
    adapter: Savable | None = None  # for `lora_adapter/`, of rank 0


class NotWrittenError(RuntimeError):
    """A checkpoint could not be written; raised on every rank."""


def take_snapshot(
    model: nn.Module,
    optimizer: Optimizer | None = None,  # None (`trainer.save_model_only`) omits its state
    scheduler: LRScheduler | None = None,
    extra: dict[str, Any] | None = None,  # tensors, numbers, strings, and lists and dictionaries of them
    files: tuple[Savable | None, ...] = (),  # config, generation config, tokenizer, processor
    adapter: Savable | None = None,  # full LoRA weights
    *,
    copies: bool = False,  # copy tensors to host memory, so that training may continue
) -> Snapshot:
    """Collect the training state of this rank."""
    tensors = _model_tensors(model)
    if optimizer is not None:
        tensors |= _named_state(model, optimizer.state)
    if copies:
        tensors = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
    manifest = {
        "world_size": dist.get_world_size(),
        BASE_MODEL: getattr(getattr(model, "config", None), "name_or_path", None) or None,
        "has_optimizer": optimizer is not None,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "scheduler": deepcopy(scheduler.state_dict()) if scheduler is not None else None,
    }
    return Snapshot(tensors, {"random": random_state(), "extra": extra or {}}, manifest, files, adapter)


def write_snapshot(path: Path, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> None:
    """Write the snapshots of all ranks into one role's folder, on a file system that all ranks share.

    Every rank calls it and waits for the others. `group` needs a CPU backend and must not be used by others
    meanwhile; None is the default group.
    """
    path, rank = Path(path), dist.get_rank()
    problem, entries = None, {}
    try:
        entries = _write_files(path, snapshot, rank, group)
    except (OSError, RuntimeError, CheckpointException) as error:  # a full disk may raise any of them
        problem = cause(error)
    parts = _gather_values(problem, entries, path, group)
    if rank == 0:
        try:
            write_manifest(path, snapshot.manifest, {name: part[name] for part in parts for name in part})
        except OSError as error:
            problem = cause(error)
    _gather_values(problem, None, path, group)


class AsyncWriter:
    """A thread on each rank that writes snapshots while training continues, one checkpoint at a time."""

    def __init__(self) -> None:
        # The thread's collectives must not mix with those of the training.
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(group, dist.ProcessGroup), "every rank belongs to it"
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(self, folder: Path, snapshots: Mapping[str, Snapshot]) -> None:
        """Start writing each snapshot into the subfolder of its name."""
        assert self._writing is None, "two checkpoints at once would hold two copies"
        self._writing = self._thread.submit(self._write, folder, snapshots)

    def is_done(self) -> bool:
        return self._writing is None or self._writing.done()

    def finish(self) -> str | None:
        """Wait until all ranks have written; return the error message, if any."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            writing.result()
        except NotWrittenError as error:
            return str(error)
        return None

    def _write(self, folder: Path, snapshots: Mapping[str, Snapshot]) -> None:
        for role, snapshot in snapshots.items():
            write_snapshot(folder / role, snapshot, self._group)


def load_shards(
    path: Path, model: nn.Module, optimizer: Optimizer | None = None, scheduler: LRScheduler | None = None
) -> dict[str, Any] | None:
    """Load what `write_snapshot` wrote, at any world size; every rank calls it. Returns this rank's `extra`.

    Random generators and `extra` belong to a rank: they are restored only if the world size is the same. The
    schedule keeps the shape given by this run's config and moves to the saved position.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_files(path, manifest)
    reader = ShardReader(path)
    tensors = _model_tensors(model)
    _check_same_model(tensors, reader.tensors(), path)

    state: dict[Tensor, dict[str, Tensor]] = {}
    if optimizer is not None and manifest["has_optimizer"]:
        _check_same_optimizer(optimizer, manifest, path)
        state = _empty_optimizer_state(model, optimizer, reader.tensors())
    elif optimizer is not None:
        logger.warning("checkpoint has weights only, the optimizer's moments start from zero: path=%s", path)
    read_tensors(reader, tensors | _named_state(model, state))
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(state)
    if scheduler is not None and manifest["scheduler"] is not None:
        scheduler.load_state_dict(manifest["scheduler"])
    return _load_rank_state(path, manifest["world_size"])


def save_huggingface_files(path: Path, *parts: Savable | None) -> None:
    """Write config, generation config, tokenizer, processor into `path/huggingface`, on rank 0."""
    folder = Path(path) / HUGGINGFACE
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part is not None:
            part.save_pretrained(folder)


def _write_files(
    path: Path, snapshot: Snapshot, rank: int, group: dist.ProcessGroup | None
) -> dict[str, FileEntry]:
    path.mkdir(parents=True, exist_ok=True)
    state_dict_saver.save(snapshot.tensors, storage_writer=FileSystemWriter(path), process_group=group)
    with (path / f"rank_{rank}.pt").open("wb") as file:
        torch.save(snapshot.rank_state, file)
        file.flush()
        os.fsync(file.fileno())
    own = [f"rank_{rank}.pt", *(file.name for file in path.glob(f"__{rank}_*.distcp"))]
    if rank == 0:
        own.append(".metadata")
        if snapshot.files:
            save_huggingface_files(path, *snapshot.files)
        if snapshot.adapter is not None:
            snapshot.adapter.save_pretrained(path / LORA_ADAPTER)
            own += [str(file.relative_to(path)) for file in (path / LORA_ADAPTER).iterdir()]
    return file_entries(path, own)


def _of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _gather_values(problem: str | None, value: Any, path: Path, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the value of every rank; raise on every rank if any has a problem."""
    both = _of_all_ranks((problem, value), group)
    found = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(both) if text is not None]
    if found:
        raise NotWrittenError(f"{path} cannot be written: {'; '.join(found)}")
    return [value for _, value in both]


def cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
    return f"{type(error).__name__}: {error}"


def _check_files(path: Path, manifest: dict[str, Any]) -> None:
    names = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]  # each by one rank
    problem = None
    try:
        check_digests(path, manifest, names)
    except (OSError, ValueError) as error:
        problem = str(error)
    damaged = next(filter(None, _of_all_ranks(problem)), None)
    if damaged is not None:
        raise ValueError(damaged)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = tensors_to_save(model, sharded_parameters(model) | persistent_buffers(model))
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def _named_state(model: nn.Module, state: dict[Tensor, dict[str, Tensor]]) -> dict[str, Tensor]:
    tensors = {}
    for name, param in sharded_parameters(model).items():
        if param in state:
            tensors |= {f"optimizer.{key}.{name}": value for key, value in state[param].items()}
    return tensors


def _empty_optimizer_state(
    model: nn.Module, optimizer: Optimizer, saved: dict[str, TensorStorageMetadata]
) -> dict[Tensor, dict[str, Tensor]]:
    """Allocate the state of every parameter that has one in the checkpoint."""
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    names = {name: param for name, param in sharded_parameters(model).items() if param in groups}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for full_key, entry in saved.items():
        if not full_key.startswith("optimizer."):
            continue
        key, name = full_key.removeprefix("optimizer.").split(".", 1)
        if name not in names:
            continue
        param, dtype = names[name], entry.properties.dtype
        if entry.size == param.shape:
            empty = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        elif entry.size:  # scales of 8-bit numbers have as many rows as the parameter
            empty = zeros_sharded_like(param, entry.size, dtype)
        else:  # a step counter, which fused kernels need on the parameter's device
            empty = torch.zeros((), dtype=dtype, device=param.device if groups[param].get("fused") else "cpu")
        state.setdefault(param, {})[key] = empty
    return state


def _check_same_model(
    tensors: dict[str, Tensor], saved: dict[str, TensorStorageMetadata], path: Path
) -> None:
    known = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith("model.")}
    wanted = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if known != wanted:
        different = sorted(key for key in known | wanted if known.get(key) != wanted.get(key))
        first = different[0]
        raise ValueError(
            f"{path} holds a different model than `worker.{path.name}.model` describes:"
            f" {len(different)} weights differ, for example {first.removeprefix('model.')}:"
            f" {known.get(first)} in the checkpoint, {wanted.get(first)} in the model"
        )


def _check_same_optimizer(optimizer: Optimizer, manifest: dict[str, Any], path: Path) -> None:
    saved, wanted = manifest.get("optimizer"), type(optimizer).__name__  # old manifests have no name
    if saved not in (None, wanted):
        raise ValueError(
            f"{path} holds the state of {saved}, which `worker.{path.name}.optim.strategy` ({wanted}) cannot"
            " continue: restore the strategy, or start over from the exported weights"
        )


def _load_rank_state(path: Path, world_size: int) -> dict[str, Any] | None:
    if world_size != dist.get_world_size():
        logger.warning(
            "random generators are reset because the number of processes changed: saved=%d now=%d path=%s",
            world_size, dist.get_world_size(), path,
        )  # fmt: skip
        return None
    state = torch.load(path / f"rank_{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
    set_random_state(state["random"])
    return state["extra"]
