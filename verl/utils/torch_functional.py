# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy straight from hidden states, without ever holding the full logits.

The logits of N tokens are N x vocabulary numbers, by far the largest tensor of a training step.
`linear_log_probs` makes them for a chunk of tokens at a time, in the forward and again in the backward
pass, and keeps two numbers for each token. The chunk size follows from a byte budget.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 256 << 20  # logits held at once; with the weight's gradient the largest part of the peak
CHUNK_BYTES_CUDA = 1 << 30  # larger matrix products fill a GPU better
BLOCK_ELEMENTS = 1 << 19  # logits whose softmax is taken at once on CPU: 2 MiB of float32 stay in the cache
BLOCK_ELEMENTS_CUDA = 1 << 26
PRODUCT_ROWS = 1 << 14  # of the weight's gradient made at once in half precision, then summed in float32


class TokenLogProbs(NamedTuple):
    """What a policy says about tokens: one number for each, float32."""

    log_probs: Tensor  # of the given tokens
    entropy: Tensor | None  # of the distribution they were drawn from; None if not asked for


class LogitTransform(NamedTuple):
    """Between the head's product and the softmax: `softcap * tanh(scale * x / softcap) / temperature`."""

    scale: float = 1.0
    softcap: float | None = None  # no capping: `scale * x / temperature`
    temperature: float = 1.0


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),  # noqa: B008 (immutable)
    with_entropy: bool = False,
    chunk_bytes: int | None = None,
) -> TokenLogProbs:
    """Log-probability of each target under `softmax(transform(hidden @ weight.T + bias))`, and the entropy.

        z = transform(hidden @ weight.T + bias);  log_prob = z[target] - logsumexp(z);  entropy =
        logsumexp(z) - p . z

    The matrix products run in the dtype of `hidden` and `weight` (under autocast, in autocast's);
    everything behind them is float32. Gradients reach `hidden`, `weight` and `bias`; both results may be
    differentiated, or either. The backward pass makes the logits again, chunk by chunk.

    Args:
        hidden: (N, hidden size); N may be zero.
        weight: (V, hidden size), in the dtype of `hidden`.
        targets: (N,) int64.
        bias: (V,).
        transform: Scale, soft cap and temperature of the logits.
        with_entropy: Compute the entropy too.
        chunk_bytes: Bytes of logits held at once; a default for the device if None.

    Returns:
        (N,) float32 log-probabilities and entropy.

    Raises:
        ValueError: The temperature is not positive, or there is not one target for each hidden state.
    """
    if transform.temperature <= 0:
        raise ValueError(f"temperature must be positive, got {transform.temperature}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"one target per hidden state: targets {tuple(targets.shape)}, hidden {tuple(hidden.shape)}"
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden, weight = (
            hidden.to(torch.get_autocast_dtype(device)),
            weight.to(torch.get_autocast_dtype(device)),
        )
    budget = chunk_bytes or (CHUNK_BYTES_CUDA if device == "cuda" else CHUNK_BYTES)
    rows = max(1, budget // (weight.shape[0] * _logits_dtype(hidden).itemsize))
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, bias, targets, transform, with_entropy, rows)
    return TokenLogProbs(log_probs, entropy)


class _LinearLogProbs(torch.autograd.Function):
    """Chunks of tokens for the matrix products, blocks of a chunk for the softmax: small temporaries."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        with_entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=accurate)
        lse = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        buffer = _chunk_buffer(hidden, weight, rows)
        for start, stop in _spans(len(hidden), rows):
            chunk = _logits(hidden[start:stop], weight, buffer)
            for first, last in _spans(stop - start, _block_rows(weight)):
                block = slice(start + first, start + last)
                z = _transformed(chunk[first:last], bias, transform, accurate)
                log_probs[block] = z.gather(1, targets[block, None])[:, 0]
                largest = z.amax(1)
                z.sub_(largest[:, None])
                unnormalised = z.exp()
                total = unnormalised.sum(1)
                lse[block] = largest + total.log()
                if entropy is not None:
                    entropy[block] = total.log() - unnormalised.mul_(z).sum(1) / total
        log_probs -= lse
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.transform, ctx.rows = transform, rows
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(lse)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_bias = (
            torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        )
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # Chunks are summed in float32; a single chunk needs no sum.
            single = len(hidden) <= ctx.rows
            grad_weight = torch.zeros_like(weight, dtype=weight.dtype if single else lse.dtype)

        buffer = _chunk_buffer(hidden, weight, ctx.rows)
        for start, stop in _spans(len(hidden), ctx.rows):
            chunk = _logits(hidden[start:stop], weight, buffer)
            for first, last in _spans(stop - start, _block_rows(weight)):
                block = slice(start + first, start + last)
                grad = _block_grad(
                    chunk[first:last], bias, targets[block], lse[block], ctx.transform, grad_log_probs[block],
                    None if grad_entropy is None else (entropy[block], grad_entropy[block]),
                )  # fmt: skip
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                chunk[first:last] = grad
            chunk = chunk.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(chunk, weight, out=grad_hidden[start:stop])
            if grad_weight is not None:
                _add_product(grad_weight, chunk, hidden[start:stop])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _block_grad(
    chunk: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    transform: LogitTransform,
    grad_log_probs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient with respect to `hidden @ weight.T` for a block of tokens.

    d log_prob / dz = onehot - p;    d entropy / dz = -p (log p + entropy)
    """
    z = _transformed(chunk, bias, transform, lse.dtype)
    slope = transform.scale / transform.temperature
    if transform.softcap is not None:
        capped = z * (transform.temperature / transform.softcap)  # tanh
        slope = capped.square_().neg_().add_(1).mul_(slope)
    log_p = z.sub_(lse[:, None])
    if entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        value, grad_value = entropy
        p = log_p.exp()
        grad = log_p.add_(value[:, None]).mul_(grad_value[:, None]).add_(grad_log_probs[:, None])
        grad = grad.mul_(p).neg_()
    grad.scatter_add_(1, targets[:, None], grad_log_probs[:, None].to(grad.dtype))
    return grad.mul_(slope)


def _transformed(chunk: Tensor, bias: Tensor | None, transform: LogitTransform, dtype: torch.dtype) -> Tensor:
    """A float32 copy of a block of head products with bias, scale, soft cap and temperature applied."""
    z = chunk.to(dtype, copy=True)
    if bias is not None:
        z.add_(bias)
    if transform.softcap is not None:
        z.mul_(transform.scale / transform.softcap).tanh_()
        return z.mul_(transform.softcap / transform.temperature)
    factor = transform.scale / transform.temperature
    return z if factor == 1.0 else z.mul_(factor)


def _logits_dtype(hidden: Tensor) -> torch.dtype:
    """Half-precision products come out of a GPU in float32; the CPU rounds them to the input's dtype."""
    return torch.promote_types(hidden.dtype, torch.float32) if hidden.is_cuda else hidden.dtype


def _chunk_buffer(hidden: Tensor, weight: Tensor, rows: int) -> Tensor:
    return hidden.new_empty(min(rows, len(hidden)), weight.shape[0], dtype=_logits_dtype(hidden))


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    """`hidden @ weight.T` in the buffer's first rows."""
    out = buffer[: len(hidden)]
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left.T @ right`."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
        return
    for start, stop in _spans(len(total), PRODUCT_ROWS):
        total[start:stop].add_(torch.mm(left[:, start:stop].t(), right))


def _block_rows(weight: Tensor) -> int:
    return max(1, (BLOCK_ELEMENTS_CUDA if weight.is_cuda else BLOCK_ELEMENTS) // weight.shape[0])


def _spans(length: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, length)) for start in range(0, length, step)]
