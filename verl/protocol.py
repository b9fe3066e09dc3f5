# SPDX-License-Identifier: Apache-2.0
"""The batch passed between stages; `batch_keys.py` lists the keys it may hold.

`DataProto` has the public methods of EasyR1's class. As there, `union`, `pop`, `rename`, `reorder` and `to`
modify the batch in place; all others return new batches, which share tensors where possible.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.batch_keys import BatchError, check_columns
from verl.utils.plain_data import decode, encode, objects, same

Index = slice | list | np.ndarray | Tensor
DISK_FORMAT = "verl.DataProto.v1"


@dataclass(eq=False)
class DataProtoItem:
    """One row of a `DataProto`: tensors without the batch dimension and the objects themselves."""

    batch: TensorDict = field(default_factory=lambda: TensorDict({}, batch_size=()))
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """A batch: tensors and object arrays with the same number of rows, and metadata of the whole batch.

    Example::

        batch = DataProto.from_dict({"prompts": torch.tensor([[5, 6], [7, 8]])}, {"uid": objects(["a", "b"])})
        batch[[1, 0]].non_tensor_batch["uid"]  # array(['b', 'a'], dtype=object)
    """

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        rows = len(next(iter(self.non_tensor_batch.values()), ()))
        self.batch = TensorDict({}, batch_size=(rows,)) if batch is None else batch
        self.check_consistency()

    def __len__(self) -> int:
        rows = self.batch.batch_size[0]
        if rows == 0 and self.batch.is_empty():  # objects may have been added since
            return len(next(iter(self.non_tensor_batch.values()), ()))
        return rows

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: Index) -> "DataProto": ...

    def __getitem__(self, item: int | Index) -> "DataProto | DataProtoItem":
        """Return one row for an integer, else a batch of the selected rows (a view for a slice)."""
        if isinstance(item, Tensor):
            item = item.tolist() if item.ndim == 0 else item.detach().cpu()
        tensors = TensorDict({}, batch_size=(len(self),)) if self.batch.is_empty() else self.batch
        if isinstance(item, (int, np.integer)):
            values = {key: value[item] for key, value in self.non_tensor_batch.items()}
            return DataProtoItem(tensors[int(item)], values, self.meta_info)
        tensor_item, array_item = (item, item) if isinstance(item, slice) else _row_index(item)
        arrays = {key: value[array_item] for key, value in self.non_tensor_batch.items()}
        return DataProto(tensors[tensor_item], arrays, dict(self.meta_info))

    def __reduce__(self) -> tuple:
        # Ray moves NumPy arrays through shared memory without another copy.
        tensors = {key: _as_bytes(value) for key, value in self.batch.items()}
        return _unpickle, (tensors, len(self), self.non_tensor_batch, self.meta_info)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> "DataProto":
        """Build a batch from tensors and object arrays (or lists) that share their first dimension."""
        if num_batch_dims != 1:
            raise BatchError(f"a batch has one batch dimension, got num_batch_dims={num_batch_dims}")
        arrays = {
            key: value if isinstance(value, np.ndarray) else objects(value)
            for key, value in (non_tensors or {}).items()
        }
        sizes = {key: (len(value) if value.ndim else -1) for key, value in (tensors or {}).items()}
        if -1 in sizes.values() or len(set(sizes.values())) > 1:
            raise BatchError(f"all tensors of a batch must have the same first dimension, got {sizes}")
        batch = TensorDict(dict(tensors), batch_size=(next(iter(sizes.values())),)) if tensors else None
        return cls(batch, arrays, dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | np.ndarray], meta_info: dict[str, Any] | None = None
    ) -> "DataProto":
        """Build a batch from one dict whose values are tensors or object arrays."""
        for key, value in data.items():
            if not isinstance(value, Tensor | np.ndarray):
                raise BatchError(
                    f"`{key}` must be a tensor or an array made by `objects`, got {type(value).__name__}"
                )
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info)

    def keys(self) -> list[str]:
        return [*_tensors(self), *self.non_tensor_batch]

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """Return a batch of the named keys; None keeps all. Only a missing tensor is an error."""
        tensors = _tensors(self)
        if batch_keys is not None:
            tensors = {key: self._require_tensor(key) for key in batch_keys}
        arrays = _only(self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = _only(self.meta_info, meta_info_keys)
        if deepcopy:
            arrays, meta_info = copy.deepcopy(arrays), copy.deepcopy(meta_info)
        batch = TensorDict(tensors, batch_size=(len(self),)) if tensors else None
        return DataProto(batch, arrays, meta_info)

    def without(self, keys: Iterable[str]) -> "DataProto":
        """Return a new batch without the named keys, where it has them. Tensors are shared."""
        left_out = set(keys)
        tensors = [key for key in _tensors(self) if key not in left_out]
        return self.select(tensors, [key for key in self.non_tensor_batch if key not in left_out])

    def merge(
        self, other: "DataProto | Mapping[str, Tensor | np.ndarray]", replace: Iterable[str] = ()
    ) -> "DataProto":
        """Return a new batch with the keys of both. Tensors are shared.

        A key of both must be equal, unless `replace` names it: then the value of `other` counts.
        """
        other = other if isinstance(other, DataProto) else DataProto.from_single_dict(other)
        return self.without(set(replace) & set(other.keys())).union(other)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeat each row: a a b b if interleaved, else a b a b."""
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)]

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Split into `chunks` batches of equal length, in order."""
        if chunks < 1 or len(self) % chunks:
            raise BatchError(
                f"a batch of {len(self)} rows cannot be split into {chunks} equal chunks:"
                " pad it with `pad_dataproto_to_divisor`"
            )
        size = len(self) // chunks
        return [self[index * size : (index + 1) * size] for index in range(chunks)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Split into batches of `split_size` rows; the last one may be shorter."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: list["DataProto"]) -> "DataProto":
        """Concatenate batches with the same keys; `meta_info` is that of the first."""
        if not data:
            raise BatchError("cannot concatenate an empty list of batches")
        first = data[0]
        for number, other in enumerate(data):
            if set(other.keys()) != set(first.keys()):
                raise BatchError(
                    f"batch {number} has the keys {sorted(other.keys())}, batch 0 {sorted(first.keys())}"
                )
        tensors = {key: _concat_tensors(key, [part.batch[key] for part in data]) for key in _tensors(first)}
        arrays = {
            key: np.concatenate([part.non_tensor_batch[key] for part in data])
            for key in first.non_tensor_batch
        }
        length = sum(len(part) for part in data)
        return DataProto(TensorDict(tensors, batch_size=(length,)), arrays, dict(first.meta_info))

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> "DataProto":
        """Remove the named keys from this batch and return them as a batch."""
        tensors = {key: self._require_tensor(key) for key in batch_keys or ()}
        self.batch = self.batch.exclude(*tensors)
        arrays = {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()}
        meta_info = {key: self.meta_info.pop(key) for key in meta_info_keys or ()}
        return DataProto.from_dict(tensors, arrays, meta_info)

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> "DataProto":
        old, new = ([keys] if isinstance(keys, str) else keys for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise BatchError(f"each key needs one new name, got {len(new)} for {len(old)} keys")
        for key in old:
            self._require_tensor(key)
        names = dict(zip(old, new, strict=True))
        tensors = {names.get(key, key): value for key, value in _tensors(self).items()}
        self.batch = TensorDict(tensors, batch_size=(len(self),))
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the keys of `other` to this batch and return it; common keys must be equal."""
        if self.keys() and other.keys() and len(self) != len(other):
            raise BatchError(f"cannot combine batches of {len(self)} and {len(other)} rows")
        rows = len(other) if other.keys() else len(self)
        tensors = _union(_tensors(self), _tensors(other))
        arrays = _union(self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = _union(self.meta_info, other.meta_info)
        self.batch, self.non_tensor_batch = TensorDict(tensors, batch_size=(rows,)), arrays
        return self

    def reorder(self, indices: Tensor) -> None:
        ordered = self[indices]
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def to(self, device: torch.device | str) -> "DataProto":
        self.batch = self.batch.to(device)
        return self

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write one file that `load_from_disk` reads without executing code from it.

        Objects may contain None, bool, int, float, str, bytes, tensors, NumPy arrays and numbers, lists,
        tuples and dicts; anything else is a `TypeError` that names the key.
        """
        tensors = {key: value.detach().cpu().clone() for key, value in _tensors(self).items()}
        columns = {
            key: [encode(value, f"`{key}`, row {row}") for row, value in enumerate(array)]
            for key, array in self.non_tensor_batch.items()
        }
        meta_info = encode(self.meta_info, "`meta_info`")
        # Torch's `weights_only` format.
        data = {"format": DISK_FORMAT, "tensors": tensors, "objects": columns, "meta_info": meta_info}
        torch.save(data, filepath)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> "DataProto":
        data = torch.load(filepath, map_location="cpu", weights_only=True)
        if not isinstance(data, dict) or data.get("format") != DISK_FORMAT:
            raise ValueError(f"{filepath}: not a batch written by `DataProto.save_to_disk`")
        arrays = {key: objects(map(decode, values)) for key, values in data["objects"].items()}
        return DataProto.from_dict(data["tensors"], arrays, decode(data["meta_info"]))

    def check_consistency(self) -> None:
        if len(self.batch.batch_size) != 1:
            raise BatchError(f"a batch has one batch dimension, got {tuple(self.batch.batch_size)}")
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise BatchError(f"`{key}` must be an array made by `objects`, got {type(value).__name__}")
            if len(value) != len(self):
                raise BatchError(f"`{key}` has {len(value)} rows, the batch {len(self)}")

    def check(self) -> None:
        """Check rows, and for keys in `BATCH_KEYS` also shapes, dtypes, masks and finite values."""
        self.check_consistency()
        check_columns({**_tensors(self), **self.non_tensor_batch}, len(self))

    def _require_tensor(self, key: str) -> Tensor:
        if key not in self.batch:
            raise KeyError(f"the batch has no tensor `{key}`: it has {list(_tensors(self))}")
        return self.batch[key]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows from the start until `size_divisor` divides the length; also return their number."""
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    if len(data) == 0:
        raise BatchError("an empty batch cannot be padded: there is no row to repeat")
    return data[torch.arange(len(data) + pad_size) % len(data)], pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    return data[: len(data) - pad_size] if pad_size else data


def _tensors(data: DataProto) -> dict[str, Tensor]:
    return dict(data.batch.items())


def _only(items: dict[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    wanted = items.keys() if keys is None else set(keys)
    return {key: value for key, value in items.items() if key in wanted}


def _row_index(item: list | np.ndarray | Tensor) -> tuple[Tensor, np.ndarray]:
    index = torch.as_tensor(item)
    index = index if index.numel() else index.long()  # an empty list becomes a tensor of floats
    return index, index.numpy()


def _concat_tensors(key: str, parts: list[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise BatchError(f"`{key}` must have one shape in all batches, got rows of {sorted(shapes)}")
    return torch.cat(parts)


def _union(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    for key in theirs:
        if key in mine and not same(mine[key], theirs[key]):
            raise BatchError(f"`{key}` has different values in the two batches")
    return {**mine, **theirs}


def _as_bytes(tensor: Tensor) -> tuple[np.ndarray, tuple[int, ...], torch.dtype]:
    # Bytes, because NumPy has no bfloat16.
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(-1).view(torch.uint8).numpy(), tuple(tensor.shape), tensor.dtype


def _unpickle(tensors: dict[str, tuple], length: int, *others: dict[str, Any]) -> DataProto:
    batch = TensorDict({key: _as_tensor(*value) for key, value in tensors.items()}, batch_size=(length,))
    return DataProto(batch, *others)


def _as_tensor(data: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if data.size == 0:
        return torch.empty(shape, dtype=dtype)
    # Ray's shared memory is read-only and may also be another rank's input: torch needs its own copy.
    data = data if data.flags.writeable else data.copy()
    return torch.from_numpy(data).view(dtype).view(shape)


def prompt_lengths(batch: DataProto) -> list[int]:
    """Count the tokens of each sequence before its response."""
    width = batch.batch["responses"].shape[1]
    return batch.batch["attention_mask"][:, :-width].sum(-1).tolist()
