# SPDX-License-Identifier: Apache-2.0
"""Attention kernels for rows of queries that attend to rows of keys.

`run_forward` and `run_backward` take one run of equally long rows: torch's fused CPU attention, or plain
matrix products in chunks on any device and with any head dimension. `flash_forward` and `flash_backward` take
all rows at once on CUDA in half precision.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.distributed.device import is_gpu

FLASH_HEAD_DIM = 256  # the largest head dimension of CUDA's flash kernels
MAX_SCORES = 1 << 26  # scores held at once by plain products, over rows and heads

_aten: Any = torch.ops.aten


class RowRun(NamedTuple):
    """Adjacent rows with equal numbers of queries and equal numbers of keys, none of them empty."""

    q_start: int
    k_start: int
    rows: int
    q_length: int
    k_length: int

    @property
    def q_slice(self) -> slice:
        return slice(self.q_start, self.q_start + self.rows * self.q_length)

    @property
    def k_slice(self) -> slice:
        return slice(self.k_start, self.k_start + self.rows * self.k_length)


def row_runs(q_lengths: Sequence[int], k_lengths: Sequence[int]) -> tuple[RowRun, ...]:
    """Return the runs of rows that have queries and keys."""
    runs: list[RowRun] = []
    q_start = k_start = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        row = RowRun(q_start, k_start, 1, q_length, k_length)
        q_start, k_start = q_start + q_length, k_start + k_length
        if not q_length or not k_length:
            continue
        if runs and _continues(runs[-1], row):
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + 1)
        else:
            runs.append(row)
    return tuple(runs)


def _continues(run: RowRun, row: RowRun) -> bool:
    lengths_agree = (run.q_length, run.k_length) == (row.q_length, row.k_length)
    return lengths_agree and run.q_slice.stop == row.q_start and run.k_slice.stop == row.k_start


class Rows(NamedTuple):
    """The rows of one call, and the transformation of scores to weights."""

    cu_q: Tensor  # (B + 1,) int32
    cu_k: Tensor  # (B + 1,) int32
    runs: tuple[RowRun, ...]
    is_causal: bool
    scale: float

    @property
    def longest(self) -> tuple[int, int]:
        """Maximum queries and maximum keys of a row."""
        return max(run.q_length for run in self.runs), max(run.k_length for run in self.runs)


def run_forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` (rows, H, Lq) of queries (rows, H, Lq, D) and keys (rows, H, Lk, D)."""
    if _has_fused_cpu(q, v):
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, rows.is_causal, scale=rows.scale
        )
    outs, lses = [], []
    for start, stop in _chunks(q, k):
        scores = _scores(q, k, start, stop, rows)
        lses.append(scores.logsumexp(-1))
        outs.append((scores.sub_(lses[-1].unsqueeze(-1)).exp_() @ v.to(scores.dtype)).to(q.dtype))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def run_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the merged `out` and `lse`."""
    if _has_fused_cpu(q, v):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, rows.is_causal, scale=rows.scale
        )
    grad_out, k, v = (tensor.to(lse.dtype) for tensor in (grad_out, k, v))
    inner = (grad_out * out).sum(-1, keepdim=True)  # (rows, H, Lq, 1)
    dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
    for start, stop in _chunks(q, k):
        weights = _scores(q, k, start, stop, rows).sub_(lse[:, :, start:stop, None]).exp_()
        grads = grad_out[:, :, start:stop]
        dv += weights.transpose(2, 3) @ grads
        # From here on `weights` holds the gradients of the scores.
        weights *= (grads @ v.transpose(2, 3) - inner[:, :, start:stop]) * rows.scale
        dqs.append(weights @ k)
        dk += weights.transpose(2, 3) @ q[:, :, start:stop].to(lse.dtype)
    return torch.cat(dqs, 2).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def has_flash(q: Tensor, v: Tensor) -> bool:
    """Check for CUDA's variable-length flash kernels: dtype and head dimensions."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return is_gpu(q.device) and half and q.shape[-1] == v.shape[-1] <= FLASH_HEAD_DIM and q.shape[-1] % 8 == 0


def flash_forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return `out` (Nq, H, D) and `lse` (H, Nq)."""
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, rows.cu_q, rows.cu_k, *rows.longest, 0.0, rows.is_causal, False, scale=rows.scale
    )
    # The kernel returns +inf for a row without keys.
    return out, lse.masked_fill(lse == float("inf"), float("-inf"))


def flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the merged `out` and `lse`."""
    tensors = grad_out.contiguous(), q, k, v, out.contiguous(), lse.contiguous()
    bounds = rows.cu_q, rows.cu_k, *rows.longest
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return _aten._flash_attention_backward(
        *tensors, *bounds, 0.0, rows.is_causal, seed, offset, scale=rows.scale
    )  # seed and offset are unused without dropout


def _has_fused_cpu(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _chunks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    size = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [(start, min(start + size, q.shape[2])) for start in range(0, q.shape[2], size)]


def _scores(q: Tensor, k: Tensor, start: int, stop: int, rows: Rows) -> Tensor:
    """Return (rows, H, chunk, Lk) scores, at least float32; -inf for later keys."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q[:, :, start:stop].to(dtype) @ k.transpose(2, 3).to(dtype) * rows.scale
    if rows.is_causal:
        keys = torch.arange(k.shape[2], device=k.device)
        scores.masked_fill_(keys > torch.arange(start, stop, device=k.device)[:, None], float("-inf"))
    return scores
