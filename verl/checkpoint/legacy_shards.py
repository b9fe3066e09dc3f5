# SPDX-License-Identifier: Apache-2.0
"""Reader of EasyR1's and verl's `model_world_size_W_rank_R.pt` files: a dictionary of DTensors for each rank.

The files are read without a process group and without the classes that wrote them, whose pickled form changes
between torch versions: substitute classes receive the pickled tensors, meshes and placements.
"""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXPECTED = "must contain the weights of a model as a dictionary of dense tensors"
SHARD_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class _Described:
    """Stores the pickled arguments and state of an object: a mesh, its layout, a tensor's spec or shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = args

    def __setstate__(self, state: Any) -> None:
        plain, slots = state if isinstance(state, tuple) else (state, None)
        self.__dict__.update(plain or {})
        self.__dict__.update(slots or {})


class _Shard(_Described):
    dim: int


class _Replicate(_Described): ...


class _ShardedTensor(Tensor):
    _local_tensor: Tensor  # the data
    _spec: Any  # has `mesh` and `placements`

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a tensor that only describes a shard")


# Each class under its old and new import paths.
SUBSTITUTES = [
    (_ShardedTensor, "torch.distributed.tensor.DTensor"),
    (_ShardedTensor, "torch.distributed._tensor.api.DTensor"),
    (_ShardedTensor, "torch.distributed.tensor._api.DTensor"),
    (_Shard, "torch.distributed.tensor.placement_types.Shard"),
    (_Shard, "torch.distributed._tensor.placement_types.Shard"),
    (_Replicate, "torch.distributed.tensor.placement_types.Replicate"),
    (_Replicate, "torch.distributed._tensor.placement_types.Replicate"),
    *((_Described, f"torch.distributed.{name}") for name in (
        "tensor._dtensor_spec.DTensorSpec", "tensor._dtensor_spec.TensorMeta",
        "tensor._dtensor_spec.ShardOrderEntry",
        "_tensor.placement_types.DTensorSpec", "_tensor.placement_types.TensorMeta",
        "_tensor._dtensor_spec.DTensorSpec", "_tensor._dtensor_spec.TensorMeta",
        "_mesh_layout._MeshLayout", "_mesh_layout._FlatLayout",
        "device_mesh.DeviceMesh", "_tensor.device_mesh.DeviceMesh",
    )),
]  # fmt: skip


@contextmanager
def _substitutes_only() -> Iterator[None]:
    """Let torch.load build the substitutes, and nothing that other code declared safe."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(SUBSTITUTES)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def find_shard_files(folder: Path) -> list[Path]:
    """Return the shard files of a folder, ordered by rank; empty if there are none."""
    files: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("model_world_size_*_rank_*.pt")):
        match = SHARD_FILE.fullmatch(path.name)
        if match:
            files.setdefault(int(match.group(1)), {})[int(match.group(2))] = path
    if not files:
        return []
    if len(files) > 1:
        raise ValueError(f"{folder} mixes shards of {sorted(files)} ranks: keep those of one save only")
    [(world_size, by_rank)] = files.items()
    missing = next((rank for rank in range(world_size) if rank not in by_rank), None)
    if missing is not None:
        name = f"model_world_size_{world_size}_rank_{missing}.pt"
        count = world_size - sum(rank < world_size for rank in by_rank)
        raise FileNotFoundError(
            f"{folder / name} is missing ({count} of {world_size} rank files are missing):"
            " copy the files of every node into this folder"
        )
    return [by_rank[rank] for rank in range(world_size)]


def load_shard_file(path: Path) -> dict[str, Tensor]:
    """Load the tensors of one rank, with memory mapping."""
    try:
        with _substitutes_only():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise NotImplementedError(
            f"{path} contains something other than tensors and DTensors ({error}):"
            " save with a torch version that writes DTensors (EasyR1 and verl on torch 2.4 or newer do)"
        ) from error
    except Exception as error:  # damaged bytes make the unpickler raise almost anything
        raise ValueError(f"{path} is damaged ({error}): copy it again from its source") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} {EXPECTED}, got {content!r:.80}")
    for name, tensor in content.items():
        is_whole = isinstance(tensor, _ShardedTensor) or (
            isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        )
        if not isinstance(name, str) or not is_whole or tensor.is_quantized:
            raise ValueError(f"{path} {EXPECTED}, got {name!r:.80}: {type(tensor).__name__}")
    return content


def join_shards(name: str, parts: list[Tensor]) -> Tensor:
    """Return a full tensor from the shards of all ranks."""
    if not isinstance(parts[0], _ShardedTensor):
        return parts[0]
    # A mesh of one axis is sharded or replicated; with two (hybrid sharding) the first replica is used.
    placements, mesh = _layout(parts[0])
    if any(not isinstance(placement, _Shard | _Replicate) for placement in placements[-1:]) or any(
        not isinstance(placement, _Replicate) for placement in placements[:-1]
    ):
        raise NotImplementedError(f"{name}: tensors sharded over several mesh axes cannot be merged")
    ranks = mesh.reshape(-1, mesh.shape[-1])[0].tolist()  # of the first replica, in order
    if isinstance(placements[-1], _Replicate):
        return parts[ranks[0]]._local_tensor
    size, place = parts[0].shape, placements[-1]
    dim = place.dim if hasattr(place, "dim") else place.given[0]
    shards = [parts[rank]._local_tensor for rank in ranks]
    whole = torch.cat([shard for shard in shards if shard.numel()], dim=dim) if len(shards) > 1 else shards[0]
    if whole.shape != size:
        raise ValueError(
            f"{name}: the shards add up to {tuple(whole.shape)} instead of {tuple(size)}:"
            " the files do not belong to the same save"
        )
    return whole


def _layout(tensor: _ShardedTensor) -> tuple[tuple[Any, ...], Tensor]:
    """Return the placements, and the ranks as a tensor of the mesh's shape."""
    spec = tensor._spec
    mesh = vars(spec.mesh)
    if isinstance(mesh.get("mesh"), Tensor):  # older versions pickle this tensor
        return tuple(spec.placements), mesh["mesh"]
    index = torch.zeros((), dtype=torch.int64)
    for shape, stride in _axes(mesh["_layout"]):
        index = index.unsqueeze(-1) + _offsets(shape, stride)
    return tuple(spec.placements), mesh["_rank_map"][index]


def _axes(layout: Any) -> list[tuple[Any, Any]]:  # (shape, stride)
    if hasattr(layout, "axes"):  # in newer versions
        return [(axis.shape, axis.stride) for axis in layout.axes]
    if isinstance(layout.shape, int):
        return [(layout.shape, layout.stride)]
    return list(zip(layout.shape, layout.stride, strict=True))


def _offsets(shape: Any, stride: Any) -> Tensor:  # in ranks
    if isinstance(shape, int):
        return torch.arange(shape) * stride
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, step in zip(shape, stride, strict=True):
        offsets = (offsets.unsqueeze(-1) + torch.arange(size) * step).flatten()
    return offsets
