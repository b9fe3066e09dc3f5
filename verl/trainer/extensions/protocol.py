# SPDX-License-Identifier: Apache-2.0
"""Checks of an extension's arguments and results, for all kinds."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.config.files.paths import is_extension
from verl.config.schema import list_options, value_at
from verl.config.trainer import RunTree
from verl.utils.registry import ProtocolError
from verl.utils.user_file import digest_of


def check_tensor(name: str, value: Any, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    if not isinstance(value, Tensor):
        raise ProtocolError(f"must return a tensor for `{name}`, got {described(value)}")
    if tuple(value.shape) != tuple(shape):
        raise ProtocolError(f"must return `{name}` of shape {tuple(shape)}, got {tuple(value.shape)}")
    if dtype is not None and value.dtype != dtype:
        raise ProtocolError(f"must return `{name}` of type {dtype}, got {value.dtype}")
    if not value.isfinite().all():
        raise ProtocolError(f"must return finite numbers for `{name}`, got {value.tolist()}")


def check_call(function: Any, arguments: tuple[Any, ...], what: str, name: str = "") -> None:
    if not callable(function):
        raise ProtocolError(f"must be a function or a class, got {described(function)}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        method = f"method `{name}` " if name else ""
        raise ProtocolError(f"{method}must take {what}: {error}") from error


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


class UsedExtension(NamedTuple):
    """An extension that a config names."""

    option: str  # dotted key
    kind: str  # a key of `KINDS`
    spec: str  # `/absolute/file.py:NAME`

    @property
    def file(self) -> Path:
        return Path(self.spec.rpartition(":")[0])


def extensions_in(config: RunTree) -> Iterator[UsedExtension]:
    """Yield the extensions that a config names, in the order of its options."""
    for entry in list_options(type(config)):
        if entry.info.extension is not None:
            value = value_at(config, entry.key)
            for item in value if isinstance(value, tuple) else (value,):
                if is_extension(item):
                    yield UsedExtension(entry.key, entry.info.extension, item)


def extension_digests(config: RunTree) -> dict[str, str]:
    """Return the digest of each extension's file, by option and name."""
    return {f"`{used.option}` ({used.spec})": digest_of(used.file) for used in extensions_in(config)}
