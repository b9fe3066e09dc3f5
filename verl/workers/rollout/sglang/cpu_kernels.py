# SPDX-License-Identifier: Apache-2.0
"""SGLang's package of kernels where only its build for CUDA can be had: what SGLang runs on CPU, in torch.

SGLang imports many names of its CPU build and calls few of them without AMX. It takes a package that has
`convert_weight_packed` for one with AMX kernels, so this one must not have it.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """Write the slots of each sequence's new tokens, one after another, into its row of a table.

    Args:
        rows: Rows of the sequences, (B,).
        table: Slots by row and position, (rows, width).
        starts: First new position of each, (B,).
        ends: After its last one, (B,).
        slots: Slots of the new tokens of all sequences, (T,).
    """
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__") or name == "convert_weight_packed":
        raise AttributeError(name)

    def missing(*args: Any, **named: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is in SGLang's own build for CPUs only")

    return missing


class _Operators:
    """`torch.ops.sgl_kernel`, where models look up operators for CPUs when they are imported."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.endswith("_cpu"):
            raise AttributeError(name)
        return __getattr__(name)


class _Mamba(ModuleType):
    """`sgl_kernel.mamba`, which layers with a state import."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return __getattr__(name)


setattr(torch.ops, "sgl_kernel", _Operators())  # noqa: B010 - torch declares no such attribute
sys.modules[f"{__name__}.mamba"] = _Mamba(f"{__name__}.mamba")
