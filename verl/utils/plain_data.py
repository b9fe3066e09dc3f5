# SPDX-License-Identifier: Apache-2.0
"""Compare values made of tensors, arrays and plain objects, and encode them for storage without pickle."""

from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

ARRAY_TAG = "__ndarray__"  # the key that marks an encoded NumPy array, or a value that is stored as text
MICROSECOND = timedelta(microseconds=1)
# Other values of tables: how they are written as text and read back.
AS_TEXT: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    datetime: (str, datetime.fromisoformat),
    date: (str, date.fromisoformat),
    time: (str, time.fromisoformat),
    timedelta: (lambda value: str(value // MICROSECOND), lambda text: int(text) * MICROSECOND),
    Decimal: (str, Decimal),
    bytes: (bytes.hex, bytes.fromhex),  # only empty ones, which `weights_only` refuses
}


def objects(values: Iterable[Any]) -> np.ndarray:
    """Return an object array (B,) of `values`."""
    return np.fromiter(values, dtype=object)  # `np.array` would unpack nested lists


def same(a: Any, b: Any) -> bool:
    """Compare two values, including the tensors and arrays in them."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same_arrays(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def encode(value: Any, where: str) -> Any:
    """Convert a value to types that `torch.load(weights_only=True)` accepts; errors call it `where`."""
    if value is None or type(value) in (bool, int, float, str) or (type(value) is bytes and value):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()  # a view would drag its whole storage along
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {ARRAY_TAG: "numeric", "values": torch.from_numpy(value.copy())}
    if isinstance(value, np.ndarray):
        return {ARRAY_TAG: "object", "values": [encode(item, where) for item in value]}
    if type(value) is list:
        return [encode(item, where) for item in value]
    if type(value) is tuple:
        return tuple(encode(item, where) for item in value)
    if type(value) is dict:
        return {encode(key, where): encode(item, where) for key, item in value.items()}
    for kind, (to_text, _) in AS_TEXT.items():
        if isinstance(value, kind):
            return {ARRAY_TAG: kind.__name__, "values": to_text(value)}
    raise TypeError(
        f"{where} holds a {type(value).__name__}, which cannot be stored safely:"
        " convert it to numbers, text, bytes, tensors, lists or dicts, or leave it out"
    )


def decode(value: Any) -> Any:
    """Undo `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, tuple):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get(ARRAY_TAG) == "numeric":
        return value["values"].numpy()
    if value.get(ARRAY_TAG) == "object":
        return objects(decode(item) for item in value["values"])
    for kind, (_, from_text) in AS_TEXT.items():
        if value.get(ARRAY_TAG) == kind.__name__:
            return from_text(value["values"])
    return {key: decode(item) for key, item in value.items()}


def _same_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype != object and b.dtype != object:
        return bool(np.array_equal(a, b))
    return all(map(same, a.flat, b.flat))
