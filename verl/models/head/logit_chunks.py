# SPDX-License-Identifier: Apache-2.0
"""Chunked products of hidden states and a head's weight, so that full logits are never held.

Matrix products run on chunks of tokens, whose size follows from a byte budget; `models/head` takes the
softmax of a chunk. `fused_log_probs` builds on both.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.distributed.device import is_gpu

CHUNK_BYTES = 256 << 20  # logits held at once; next to the weight's gradient the largest part of the peak
CHUNK_BYTES_CUDA = 1 << 30  # larger matrix products fill a GPU better
PRODUCT_ROWS = 1 << 14  # rows of the weight's gradient per half-precision product, summed in float32


class LogitTransform(NamedTuple):
    """The transform of head products: `softcap * tanh(scale * x / softcap) / temperature`."""

    scale: float = 1.0
    softcap: float | None = None  # no capping: `scale * x / temperature`
    temperature: float = 1.0

    def slope(self, z: Tensor) -> Tensor | float:
        """Return the derivative of the transform at the point where its value is `z`."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        tanh = z * (self.temperature / self.softcap)
        return tanh.square_().neg_().add_(1).mul_(slope)


class HeadLogits(NamedTuple):
    """The factors of N tokens' logits, `transform(hidden @ weight.T + bias)`."""

    hidden: Tensor  # (N, hidden size)
    weight: Tensor  # (V, hidden size), in the dtype of `hidden`
    bias: Tensor | None = None  # (V,)
    transform: LogitTransform = LogitTransform()
    part: Any = None  # the `VocabularyPart` of weight and bias, if other ranks have the others

    def of_tokens(self, tokens: Tensor) -> "HeadLogits":
        """Return the factors of some of the tokens, (M,) int64."""
        return self._replace(hidden=self.hidden.index_select(0, tokens))

    def of_vocabulary(self, size: int) -> "HeadLogits":
        """Return the factors of the logits of the first `size` tokens of the vocabulary."""
        if size == len(self.weight):
            return self
        assert self.part is None, "runs with teachers do not divide the vocabulary over ranks"
        return self._replace(weight=self.weight[:size], bias=None if self.bias is None else self.bias[:size])


class HeadProducts(NamedTuple):
    """Products of M tokens with a head's weight, and the bias and transform that make them logits."""

    values: Tensor  # (M, V), a contiguous part of a chunk
    bias: Tensor | None  # (V,)
    transform: LogitTransform


# (tokens, products of heads, gradient of the bias to add to) to gradient of the first head's products, in the
# dtype of its hidden states
ChunkGradient = Callable[[slice, Sequence[HeadProducts], Tensor | None], Tensor]


def autocast_head(head: HeadLogits) -> HeadLogits:
    """Cast the head to autocast's dtype, if autocast is enabled, and check the temperature."""
    if head.transform.temperature <= 0:
        raise ValueError(f"temperature must be positive, got {head.transform.temperature}")
    device = head.hidden.device.type
    if not torch.is_autocast_enabled(device):
        return head
    dtype = torch.get_autocast_dtype(device)
    return head._replace(hidden=head.hidden.to(dtype), weight=head.weight.to(dtype))


def chunk_rows(heads: Sequence[HeadLogits], chunk_bytes: int | None) -> int:
    """Return the number of tokens whose logits of all heads together fit the budget; at least one."""
    budget = chunk_bytes or (CHUNK_BYTES_CUDA if is_gpu(heads[0].hidden.device) else CHUNK_BYTES)
    return max(1, budget // sum(len(head.weight) * _logits_dtype(head.hidden).itemsize for head in heads))


def chunks(heads: Sequence[HeadLogits], rows: int) -> Iterator[tuple[slice, list[HeadProducts]]]:
    """Yield slices of the tokens and the products of each head; the next chunk overwrites them."""
    num_tokens = len(heads[0].hidden)
    buffers = [
        head.hidden.new_empty(min(rows, num_tokens), len(head.weight), dtype=_logits_dtype(head.hidden))
        for head in heads
    ]
    for start, stop in spans(num_tokens, rows):
        products = [
            HeadProducts(_product(head.hidden[start:stop], head.weight, buffer[: stop - start]), *head[2:4])
            for head, buffer in zip(heads, buffers, strict=True)
        ]
        yield slice(start, stop), products


def spans(length: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def head_gradients(
    ctx: Any,  # of an autograd function with these three inputs first; has `rows`, the size of a chunk
    heads: Sequence[HeadLogits],  # of the policy first; the others' products are needed too
    accurate: torch.dtype,  # of sums over chunks
    chunk_grad: ChunkGradient,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of the policy's hidden states, weight and bias."""
    hidden, weight, bias, *_ = heads[0]
    grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    grad_weight, grad_bias = None, None
    if bias is not None and ctx.needs_input_grad[2]:
        grad_bias = torch.zeros_like(bias, dtype=accurate)
    if ctx.needs_input_grad[1]:
        # Chunks are summed in float32; a single chunk needs no sum.
        single = len(hidden) <= ctx.rows
        grad_weight = torch.zeros_like(weight, dtype=weight.dtype if single else accurate)

    _add_gradients(heads, ctx.rows, chunk_grad, grad_hidden, grad_weight, grad_bias)
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)  # the chunk's memory is free again
    return grad_hidden, grad_weight, grad_bias


def _add_gradients(
    heads: Sequence[HeadLogits],
    rows: int,
    chunk_grad: ChunkGradient,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    hidden, weight, *_ = heads[0]
    for chunk, products in chunks(heads, rows):
        grads = chunk_grad(chunk, products, grad_bias)
        if grad_hidden is not None:
            torch.mm(grads, weight, out=grad_hidden[chunk])
        if grad_weight is not None:
            _add_product(grad_weight, grads, hidden[chunk])


def _logits_dtype(hidden: Tensor) -> torch.dtype:
    # A GPU returns half-precision products in float32; the CPU rounds them to the input's dtype.
    return torch.promote_types(hidden.dtype, torch.float32) if is_gpu(hidden.device) else hidden.dtype


def _product(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:  # total += left.T @ right
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
        return
    for start, stop in spans(len(total), PRODUCT_ROWS):
        total[start:stop].add_(torch.mm(left[:, start:stop].t(), right))
