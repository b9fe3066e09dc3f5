# SPDX-License-Identifier: Apache-2.0
"""Attention within each sequence of a packed batch, where the process has no kernel for all rows at once.

It is one dense attention for each run of equally long sequences, exact in float32, without a mask over all
packed tokens.

Local attention, to the last tokens of a window or to the same chunk, also has rows for responses that follow
a shared prompt and see the end of it: a copy of the prompt's last keys comes before the response's own, and
the row's queries are at the end of its keys.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.distributed.device import has_kernels
from verl.models.attention.kernels import AttentionRule, RowRun
from verl.models.attention.partial_attention import AttentionCall, Span


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[RowRun], rule: AttentionRule
) -> Tensor:
    """Compute attention (1, N, H, D) of (1, H, N, D) queries to (1, Hkv, N, D) keys of their own sequence."""
    sizes = [run.rows * run.q_length for run in runs]
    parts = zip(runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outs = []
    for run, *tensors in parts:
        # (rows, H, length, D) each
        q, k, v = (tensor.squeeze(0).unflatten(1, (run.rows, -1)).transpose(0, 1) for tensor in tensors)
        outs.append(_attend_dense(q, k, v, rule).transpose(1, 2).flatten(0, 1))  # (rows * length, H, D)
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """Compute attention within each row of (rows, H, length, D) tensors."""
    length = query.shape[2]
    if has_kernels(query.device):  # its fused kernels need equal heads
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    if rule.window is not None and rule.window < length:
        return _attend_in_window(query, key, value, rule.scale, rule.window)
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=rule.is_causal and length > 1, scale=rule.scale, enable_gqa=grouped
    )


def _attend_in_window(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Attend in chunks of queries, so that no mask is larger than chunk x (chunk + window)."""
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    length, chunk = query.shape[2], max(window, 64)
    outs = []
    for start in range(0, length, chunk):
        stop, first = min(start + chunk, length), max(0, start - window + 1)
        queries, keys = (torch.arange(*span, device=query.device) for span in ((start, stop), (first, stop)))
        behind = queries[:, None] - keys
        mask = (behind >= 0) & (behind < window)  # (chunk, keys) bool
        q, k, v = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(outs, 2)


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)


class Part(NamedTuple):
    """Adjacent packed tokens that may attend to each other, as far as they are not later."""

    start: int  # the first query
    queries: int
    before: tuple[int, int]  # tokens of the prompt that come before the queries' own keys: start and stop


def is_local(rule: AttentionRule, longest_row: int) -> bool:
    """Return whether some tokens of a row of that length do not see all earlier ones."""
    return any(size is not None and size < longest_row for size in (rule.window, rule.chunk))


def local_call(
    groups: Sequence[tuple[int, Sequence[int]]], rule: AttentionRule, device: torch.device | str | None
) -> AttentionCall:
    """Return the call that covers all packed tokens of groups (prompt length, response lengths)."""
    parts = [part for part in _parts(groups, rule) if part.queries]
    copied = [stop - start for start, stop in (part.before for part in parts)]
    lengths = [part.queries for part in parts]
    keys = [more + length for more, length in zip(copied, lengths, strict=True)]
    queries, all_keys = Span.of_all([(0, lengths), (0, keys)], device)
    if not any(copied):
        return AttentionCall.of(queries, queries, is_causal=True)
    taken: list[torch.Tensor] = []
    for part in parts:
        taken += [torch.arange(*part.before), torch.arange(part.start, part.start + part.queries)]
    index = torch.cat(taken).to(device or "cpu", non_blocking=True)
    return AttentionCall.of(queries, all_keys, is_causal=True, taken=index)


def _parts(groups: Sequence[tuple[int, Sequence[int]]], rule: AttentionRule) -> Iterator[Part]:
    start = 0
    for prompt, responses in groups:
        first, *others = [length for length in responses if length] or [0]
        yield from _following(start, 0, prompt + first, rule, start)
        at = start + prompt + first
        for length in others:
            yield from _following(start, prompt, length, rule, at)
            at += length
        start = at


def _following(prompt_start: int, prompt: int, length: int, rule: AttentionRule, at: int) -> Iterator[Part]:
    """Yield the parts of `length` tokens from position `at` on that follow a prompt."""
    chunk = prompt + length if rule.chunk is None else rule.chunk
    position, stop = prompt, prompt + length  # in the row
    while position < stop:
        chunk_start = position // chunk * chunk
        size = min(stop, chunk_start + chunk) - position
        seen = 0 if position > prompt else prompt - chunk_start
        if rule.window is not None:
            seen = min(seen, rule.window - 1)
        end = prompt_start + prompt
        yield Part(at + position - prompt, size, (end - seen, end))
        position += size
