# SPDX-License-Identifier: Apache-2.0
"""Attention kernels for packed rows of any lengths: the one inside of torch, and the process's choice.

The other kernels belong to packages, see `flash_packages`. To add one, write a `VarlenKernel` and offer it in
`flash_packages.choose_kernels`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.distributed.device import has_kernels
from verl.models.attention.kernels import HALF_TYPES, Rows

_aten: Any = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class VarlenKernel(ABC):
    """Attention of rows of queries (Nq, H, D) to rows of keys and values (Nk, Hkv, D), with any strides.

    The limits are those of the kernels for GPUs, whose backward reads contiguous tensors.
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
        if q.shape[-1] != v.shape[-1] or q.shape[-1] > self.largest_head or q.shape[-1] % 8:
            return (
                "needs equal head dimensions of keys and values, a multiple of 8 up to"
                f" {self.largest_head}, not {q.shape[-1]} and {v.shape[-1]}"
            )
        if softcap is not None and not self.takes_softcap:
            return "has no soft cap of the scores"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return `out` (Nq, H, D), and `lse` (H, Nq) float32, -inf for rows without keys."""
        out, lse, *_ = self.run(q, k, v, rows)
        return out, lse.masked_fill(lse == float("inf"), float("-inf"))  # as FlashAttention 2 returns +inf

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        """Return the output, the log-sum-exp, and whatever the kernel adds."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
    ) -> Gradients:
        """Return the gradients of q, k and v, given the merged `out` and `lse`."""
        return self.gradients((grad_out.contiguous(), q, k, v, out.contiguous(), lse.contiguous()), rows)

    @abstractmethod
    def gradients(self, tensors: Sequence[Tensor], rows: Rows) -> Gradients:
        """Compute `backward` from contiguous gradients of the output, q, k, v, output and log-sum-exp."""


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
