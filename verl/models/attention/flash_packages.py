# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 2, 3 and 4 from their packages, and the choice of kernels for a GPU.

The kernels are called below the packages' autograd functions: attention to parts of the keys needs the
log-sum-exp in forward, and a backward that takes the merged one.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.distributed.device import has_kernels, module_of
from verl.models.attention.kernels import Rows
from verl.models.attention.varlen_kernels import (
    Gradients,
    KernelChoice,
    TorchKernel,
    VarlenKernel,
    longest_of,
    use_kernels,
    window_of,
)
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

OPTION = "`worker.actor.attention_kernel`"
NO_DROPOUT: dict[str, Any] = {"dropout_p": 0.0, "alibi_slopes": None}


class FlashAttention2(VarlenKernel):
    """The package `flash-attn`, from 2.7 on."""

    name = "flash-attn 2"

    def __init__(self) -> None:
        self._package: Any = importlib.import_module("flash_attn.flash_attn_interface")

    @staticmethod
    def problem(capability: tuple[int, int]) -> str | None:
        if importlib.util.find_spec("flash_attn_2_cuda") is None:
            return "flash-attn is not installed (pip install flash-attn --no-build-isolation)"
        found = importlib.metadata.version("flash-attn")
        if tuple(map(int, found.split(".")[:2])) < (2, 7):
            return f"flash-attn {found} is too old (pip install -U flash-attn --no-build-isolation)"
        return None if capability >= (8, 0) else "flash-attn 2 needs compute capability 8.0"

    def run(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        return self._package._flash_attn_varlen_forward(
            *(q, k, v, rows.cu_q, rows.cu_k, *longest_of(rows)), **NO_DROPOUT, **_rule(rows)
        )

    def gradients(self, tensors: Sequence[Tensor], rows: Rows) -> Gradients:
        grads = _empty_gradients(tensors, rows)
        self._package._flash_attn_varlen_backward(
            *(*tensors, *grads, rows.cu_q, rows.cu_k, *longest_of(rows)),
            **NO_DROPOUT,
            **_rule(rows),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


def _rule(rows: Rows) -> dict[str, Any]:
    is_causal, before, after = window_of(rows)
    return {
        "softmax_scale": rows.scale,
        "causal": is_causal,
        "window_size_left": before,
        "window_size_right": after,
        "softcap": rows.softcap or 0.0,
    }


def _lengths(rows: Rows) -> dict[str, Any]:
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, (rows.cu_q, rows.cu_k, *rows.longest), strict=True))


class FlashAttention3(VarlenKernel):
    """The package `flash-attn-3`, whose module `flash_attn_interface` registers operators of torch."""

    name = "flash-attn 3"

    def __init__(self) -> None:
        importlib.import_module("flash_attn_interface")
        self._ops: Any = torch.ops.flash_attn_3

    @staticmethod
    def problem(capability: tuple[int, int]) -> str | None:
        if importlib.util.find_spec("flash_attn_interface") is None:
            return "flash-attn-3 is not installed (build `hopper` of the flash-attention repository)"
        return None if capability == (9, 0) else "flash-attn 3 needs compute capability 9.0"

    def run(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        # One split of the keys: more pay off for few queries, and would change the rounding with the batch.
        return self._ops.fwd(q, k, v, **self._rows(rows), num_splits=1)

    def gradients(self, tensors: Sequence[Tensor], rows: Rows) -> Gradients:
        grads = _empty_gradients(tensors, rows)
        self._ops.bwd(*tensors, **self._rows(rows), **_written(grads))
        return grads

    @staticmethod
    def _rows(rows: Rows) -> dict[str, Any]:
        rule = _rule(rows)
        return {**_lengths(rows), "is_causal": rule.pop("causal"), **rule}


class FlashAttention4(VarlenKernel):
    """The package `flash-attn-4`, in the folder `cute` of `flash_attn`."""

    name = "flash-attn 4"
    largest_head = 128

    def __init__(self) -> None:
        self._package: Any = importlib.import_module("flash_attn.cute.interface")

    @staticmethod
    def problem(capability: tuple[int, int]) -> str | None:
        spec = importlib.util.find_spec("flash_attn")
        folders = (spec.submodule_search_locations if spec else None) or []
        if not any(Path(folder, "cute", "interface.py").exists() for folder in folders):
            return "flash-attn-4 is not installed (pip install flash-attn-4)"
        return None if capability[0] in (9, 10) else "flash-attn 4 needs compute capability 9 or 10"

    def run(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        return self._package._flash_attn_fwd(
            q, k, v, **self._rows(rows), softcap=rows.softcap, return_lse=True
        )

    def gradients(self, tensors: Sequence[Tensor], rows: Rows) -> Gradients:
        grads = _empty_gradients(tensors, rows)
        grad_out, q, k, v, out, lse = tensors
        softcap = rows.softcap or 0.0
        self._package._flash_attn_bwd(
            q, k, v, out, grad_out, lse, **self._rows(rows), softcap=softcap, **_written(grads)
        )
        return grads

    @staticmethod
    def _rows(rows: Rows) -> dict[str, Any]:
        is_causal, *_ = window_of(rows)
        return {
            **_lengths(rows),
            "softmax_scale": rows.scale,
            "causal": is_causal,
            "window_size_left": rows.before,
            "window_size_right": None if is_causal else rows.after,
        }


def _empty_gradients(tensors: Sequence[Tensor], rows: Rows) -> Gradients:
    """Allocate contiguous gradients; zero where rows without queries or keys may be left out."""
    is_full = sum(run.rows for run in rows.runs) == len(rows.cu_q) - 1
    create = torch.empty if is_full else torch.zeros
    dq, dk, dv = (create(each.shape, dtype=each.dtype, device=each.device) for each in tensors[1:4])
    return dq, dk, dv


def _written(grads: Gradients) -> dict[str, Any]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    return {**dict(zip(("dq", "dk", "dv"), grads, strict=True)), "deterministic": deterministic}


PACKAGES = (FlashAttention3, FlashAttention2, FlashAttention4)  # in order of preference


def select_kernels(name: str, device: torch.device) -> None:
    """Use the kernels of the option `attention_kernel` in this process, and log them on rank 0."""
    choice = choose_kernels(name, device)
    use_kernels(choice)
    if has_kernels(device):
        logger.info("attention kernels: %s", ", ".join(kernel.name for kernel in choice.kernels))


def choose_kernels(name: str, device: torch.device) -> KernelChoice:
    """Return the kernels that the option `attention_kernel` selects.

    With `auto`, FlashAttention 3 is first where it is installed and supports the GPU, then the kernel inside
    of torch, and flash-attn 2 takes what that one cannot: a soft cap.

    Raises:
        RuntimeError: `flash` is set, and no installed package supports the GPU.
    """
    if name == "torch" or (name == "auto" and not has_kernels(device)):
        return KernelChoice((TorchKernel(),))
    capability = module_of(device).get_device_capability(device) if has_kernels(device) else (0, 0)
    if name == "auto":
        first: list[VarlenKernel] = [FlashAttention3()] if FlashAttention3.problem(capability) is None else []
        last: list[VarlenKernel] = [FlashAttention2()] if FlashAttention2.problem(capability) is None else []
        return KernelChoice((*first, TorchKernel(), *last))
    if not has_kernels(device):
        raise RuntimeError(f"{OPTION} (flash) needs a GPU, not the {device.type}: set it to auto")
    problems = [package.problem(capability) for package in PACKAGES]
    for package, problem in zip(PACKAGES, problems, strict=True):
        if problem is None:
            return KernelChoice((package(),), is_required=True)
    raise RuntimeError(
        f"{OPTION} (flash) finds no FlashAttention for this GPU: {'; '.join(filter(None, problems))};"
        " install one, or set it to auto"
    )
