# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows by its definition, row by row in float64: a kernel to hold others against."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verl.models.attention.kernels import Rows


class PlainKernel:
    """Records its calls; takes every tensor on the CPU."""

    name = "plain"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def obstacle(self, q: Tensor, v: Tensor, softcap: float | None) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        out = torch.zeros(q.shape, dtype=torch.float64)
        lse = torch.full((q.shape[1], len(q)), float("-inf"), dtype=torch.float64)
        k, v = (_for_heads_of(q, tensor) for tensor in (k, v))
        for queries, keys in _bounds(rows):
            scores = _scores(q[queries].double(), k[keys], rows)
            lse[:, queries] = scores.logsumexp(-1)
            out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys])
        return out.to(q.dtype), lse.float()

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
    ) -> tuple[Any, ...]:
        self.calls.append("backward")
        with torch.enable_grad():
            leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
            wide_k, wide_v = (_for_heads_of(q, tensor) for tensor in leaves[1:])
            inner = (grad_out.double() * out).sum(-1)  # (Nq, H)
            # Its gradients are those of attention: the merged out and lse are constants of the softmax.
            total = torch.stack([tensor.sum() * 0 for tensor in leaves]).sum()
            for queries, keys in _bounds(rows):
                scores = _scores(leaves[0][queries], wide_k[keys], rows)
                weights = torch.exp(scores - lse[:, queries, None])
                dots = torch.einsum("qhd,khd->hqk", grad_out[queries].double(), wide_v[keys])
                total = total + (weights * (dots - inner[queries].T[..., None])).sum()
            grads = torch.autograd.grad(total, leaves)
        return tuple(grad.to(tensor.dtype) for grad, tensor in zip(grads, (q, k, v), strict=True))


def _for_heads_of(q: Tensor, tensor: Tensor) -> Tensor:
    return tensor.double().repeat_interleave(q.shape[1] // tensor.shape[1], 1)


def _bounds(rows: Rows) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each row that has both."""
    bounds = (itertools.pairwise(cu.tolist()) for cu in (rows.cu_q, rows.cu_k))
    for queries, keys in zip(*bounds, strict=True):
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield slice(*queries), slice(*keys)


def _scores(q: Tensor, k: Tensor, rows: Rows) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * rows.scale
    if rows.softcap is not None:
        scores = rows.softcap * torch.tanh(scores / rows.softcap)
    for query in range(len(q)):  # the last query is at the last key
        own = query + len(k) - len(q)
        for key in range(len(k)):
            is_before = rows.before is not None and key < own - rows.before
            if is_before or (rows.after is not None and key > own + rows.after):
                scores[:, query, key] = float("-inf")
    return scores
