# SPDX-License-Identifier: Apache-2.0
"""Attention kernels for packed rows of any lengths, of torch and of packages, and the process's choice.

They are called below the packages' autograd functions: attention to parts of the keys needs the log-sum-exp
in forward, and a backward that takes the merged one. To add one, write a `VarlenKernel` and offer it in
`choose_kernels`.
"""

import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.distributed.device import has_kernels, module_of
from verl.models.attention.kernels import HALF_TYPES, Rows
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

OPTION = "`worker.actor.attention_kernel`"
NO_DROPOUT: dict[str, Any] = {"dropout_p": 0.0, "alibi_slopes": None}

_aten: Any = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class VarlenKernel(ABC):
    """Attention of rows of queries (Nq, H, D) to rows of keys and values (Nk, Hkv, D), with any strides.

    The limits are those of the kernels for GPUs, whose backward reads contiguous tensors. Values that are
    narrower than keys, as in latent attention (192 and 128), get columns of zeros, which change nothing.
    """

    name: str
    largest_head = 256
    takes_softcap = True

    def obstacle(self, q: Tensor, v: Tensor, softcap: float | None) -> str | None:
        """Return why the kernel cannot take such tensors, or None."""
        if not has_kernels(q.device):
            return f"needs a GPU, not the {q.device.type}"
        if q.dtype not in HALF_TYPES:
            return f"computes in bf16 or fp16, not in {q.dtype}"
        if q.shape[-1] < v.shape[-1] or q.shape[-1] > self.largest_head or q.shape[-1] % 8:
            return (
                f"needs heads of keys with a multiple of 8 up to {self.largest_head} dimensions, and values"
                f" with at most as many, not {q.shape[-1]} and {v.shape[-1]}"
            )
        if softcap is not None and not self.takes_softcap:
            return "has no soft cap of the scores"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return `out` (Nq, H, D), and `lse` (H, Nq) float32, -inf for rows without keys."""
        out, lse, *_ = self.run(q, k, _widened(v, q), rows)
        if v.shape[-1] < q.shape[-1]:
            out = out[..., : v.shape[-1]].contiguous()
        return out, lse.masked_fill(lse == float("inf"), float("-inf"))  # as FlashAttention 2 returns +inf

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        """Return the output, the log-sum-exp, and whatever the kernel adds."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
    ) -> Gradients:
        grad_out, wide, out = (_widened(each, q) for each in (grad_out.contiguous(), v, out.contiguous()))
        dq, dk, dv = self.gradients((grad_out, q, k, wide, out, lse.contiguous()), rows)
        return dq, dk, dv[..., : v.shape[-1]]

    @abstractmethod
    def gradients(self, tensors: Sequence[Tensor], rows: Rows) -> Gradients:
        """Compute `backward` from contiguous gradients of the output, q, k, v, output and log-sum-exp."""


def _widened(tensor: Tensor, like: Tensor) -> Tensor:
    missing = like.shape[-1] - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def window_of(rows: Rows) -> tuple[bool, int, int]:
    """Return the flag and the window (keys before, keys after, -1 for all) that flash kernels take."""
    is_causal = rows.before is None and rows.after == 0
    before, after = (-1 if size is None else size for size in (rows.before, rows.after))
    return is_causal, before, after


def longest_of(rows: Rows) -> tuple[int, int]:
    """Return the most queries and keys of a row, as FlashAttention 2 takes them.

    For at most one query it would rearrange grouped heads in a way that needs a query in every row.
    """
    queries, keys = rows.longest
    return max(2, queries), keys


class TorchKernel(VarlenKernel):
    """The FlashAttention 2 that is compiled into torch."""

    name = "torch"
    takes_softcap = False

    def run(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        is_causal, before, after = window_of(rows)
        return _aten._flash_attention_forward(
            *(q, k, v, rows.cu_q, rows.cu_k, *longest_of(rows), 0.0, is_causal, False),
            scale=rows.scale,
            window_size_left=before,
            window_size_right=after,
        )

    def gradients(self, tensors: Sequence[Tensor], rows: Rows) -> Gradients:
        is_causal, before, after = window_of(rows)
        # The seed and the offset are unused without dropout.
        seed = torch.zeros(2, dtype=torch.uint64, device=tensors[0].device)
        offset = torch.empty(0, device=tensors[0].device)
        return _aten._flash_attention_backward(
            *(*tensors, rows.cu_q, rows.cu_k, *longest_of(rows), 0.0, is_causal, seed, offset),
            scale=rows.scale,
            window_size_left=before,
            window_size_right=after,
        )


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


class KernelChoice(NamedTuple):
    """Kernels in order of preference."""

    kernels: tuple[VarlenKernel, ...]
    is_required: bool = False  # tensors that no kernel takes are an error; otherwise plain attention is used

    def find(self, q: Tensor, v: Tensor, softcap: float | None) -> VarlenKernel | None:
        """Return the first kernel that takes such tensors."""
        obstacles = []
        for kernel in self.kernels:
            obstacle = kernel.obstacle(q, v, softcap)
            if obstacle is None:
                return kernel
            obstacles.append(f"{kernel.name} {obstacle}")
        if self.is_required:
            raise NotImplementedError(
                f"no attention kernel takes this model: {'; '.join(obstacles)}:"
                " set `worker.actor.attention_kernel` to auto"
            )
        return None


DEFAULT = KernelChoice((TorchKernel(),))
_choice = DEFAULT


def kernel_for(q: Tensor, v: Tensor, softcap: float | None) -> VarlenKernel | None:
    """Return the process's kernel for such tensors, or None if plain attention must compute them."""
    return _choice.find(q, v, softcap)


def use_kernels(choice: KernelChoice) -> KernelChoice:
    """Set the kernels of this process and return the previous ones."""
    global _choice
    previous, _choice = _choice, choice
    return previous


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
        return DEFAULT
    if not has_kernels(device):
        raise RuntimeError(f"{OPTION} (flash) needs a GPU, not the {device.type}: set it to auto")
    capability = module_of(device).get_device_capability(device)
    problems = {package: package.problem(capability) for package in PACKAGES}
    usable = [package for package, problem in problems.items() if problem is None]
    if name == "auto":
        first = [FlashAttention3()] if FlashAttention3 in usable else []
        last = [FlashAttention2()] if FlashAttention2 in usable else []
        return KernelChoice((*first, TorchKernel(), *last))
    if usable:
        return KernelChoice((usable[0](),), is_required=True)
    found = "; ".join(filter(None, problems.values()))
    raise RuntimeError(
        f"{OPTION} (flash) finds no FlashAttention for this GPU: {found}; install one, or set it to auto"
    )
