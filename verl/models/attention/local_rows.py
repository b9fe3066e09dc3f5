# SPDX-License-Identifier: Apache-2.0
"""Rows of queries and keys for local attention: to the last tokens of a window, or to the same chunk.

A response that follows a shared prompt sees the end of it: a copy of the prompt's last keys comes before the
response's own, and the row's queries are at the end of its keys.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from verl.models.attention.kernels import AttentionRule
from verl.models.attention.partial_attention import AttentionCall, Span


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
