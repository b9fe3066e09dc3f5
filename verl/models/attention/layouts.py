# SPDX-License-Identifier: Apache-2.0
"""Attention layouts: which packed tokens attend to which; all layers of a model share one layout.

- `PackedLayout`: concatenated sequences that attend to themselves.
- `SharedLayout`: groups of a prompt and its responses; a response attends to the prompt and itself.

To add a layout, write a class with `attend`; `sequence_parallel_layouts` has the layouts that span processes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from verl.models.attention.kernels import AttentionRule, RowRun, row_runs
from verl.models.attention.partial_attention import AttentionCall, Span, attend_calls
from verl.models.attention.row_attention import attend_rows
from verl.models.linear_attention.recurrence import Recurrence, group_segments, row_segments

T = TypeVar("T")


class Layout(Protocol):
    """The attention pattern of packed tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Compute attention of (1, H, N, D) queries to (1, Hkv, N, D) keys and values: (1, N, H, D)."""
        ...

    @property
    def recurrence(self) -> Recurrence:
        """The order in which layers with a state read the tokens."""
        ...


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Concatenated sequences."""

    sequences: Span
    runs: tuple[RowRun, ...]  # of sequences with equal lengths

    @classmethod
    def of(cls, cu_seqlens: Tensor, device: torch.device | str | None = None) -> "PackedLayout":
        """Build the layout of (B + 1,) boundaries for tokens on `device`, by default that of the boundaries.

        Boundaries on the CPU are copied to the device without waiting for it; boundaries on a GPU are read
        back, which does wait. Both are cached on `cu_seqlens`, which all blocks of a vision tower pass on.
        """
        device = cu_seqlens.device if device is None else torch.device(device)
        lengths, runs = cached_on(cu_seqlens, "rows", lambda: _rows_within(cu_seqlens))
        on_device = cu_seqlens
        if cu_seqlens.device != device or cu_seqlens.dtype != torch.int32:
            on_device = cached_on(
                cu_seqlens,
                f"rows_on_{device}",
                lambda: cu_seqlens.to(device, torch.int32, non_blocking=True),
            )
        return cls(Span(slice(0, sum(lengths)), on_device, lengths), runs)

    @property
    def cu_seqlens(self) -> Tensor:
        return self.sequences.cu_rows

    @property
    def recurrence(self) -> Recurrence:
        lengths, device = self.sequences.lengths, self.cu_seqlens.device
        return cached_on(self, "_recurrence", lambda: Recurrence(row_segments(lengths), device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        rows = AttentionCall(self.sequences, self.sequences, rule.is_causal, self.runs)
        return attend_rows(query, key, value, rows, rule)


@dataclass(frozen=True, eq=False)
class SharedLayout:
    """Concatenated groups of a prompt and its responses; responses do not attend to each other.

    Example::

        SharedLayout.of([(5, [2, 3]), (4, [2])])  # p p p p p a a b b b  q q q q c c
    """

    # A causal call over the segments, where the first response continues the prompt's segment, and for each
    # group a call of its other responses to the whole prompt.
    calls: tuple[AttentionCall, ...]
    longest_row: int  # prompt and response
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ()  # lengths of prompts and of their responses

    @classmethod
    def of(
        cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str | None = None
    ) -> "SharedLayout":
        """Build the layout of groups (prompt length, response lengths), which may include empty responses."""
        if any(prompt < 1 for prompt, _ in groups):
            raise ValueError("a shared prompt has at least one token")
        rows = [length for group in groups for length in _causal_rows(*group)]
        parts: list[tuple[int, list[int]]] = [(0, rows)]  # then queries and keys of each further call
        start = 0
        for prompt, responses in groups:
            first, *others = _causal_rows(prompt, responses)
            if others:
                parts += [(start + first, [sum(others)]), (start, [prompt])]
            start += first + sum(others)
        everything, *spans = Span.of_all(parts, device)
        calls = [AttentionCall.of(everything, everything, is_causal=True)]
        for queries, keys in zip(spans[::2], spans[1::2], strict=True):
            calls.append(AttentionCall.of(queries, keys, is_causal=False))
        longest = max((prompt + max(responses, default=0) for prompt, responses in groups), default=0)
        return cls(tuple(calls), longest, tuple((prompt, tuple(responses)) for prompt, responses in groups))

    @property
    def recurrence(self) -> Recurrence:
        device = self.calls[0].queries.cu_rows.device
        return cached_on(self, "_recurrence", lambda: Recurrence(group_segments(self.groups), device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        refusal = unsupported(rule, self.longest_row)
        if refusal is not None:
            raise NotImplementedError(
                f"with a shared prompt, {refusal}: set `worker.actor.share_prompt` to false"
            )
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (N, H, D) each
        return attend_calls(q, k, v, self.calls, rule).unsqueeze(0)


def _rows_within(cu_seqlens: Tensor) -> tuple[tuple[int, ...], tuple[RowRun, ...]]:
    lengths = tuple(stop - start for start, stop in itertools.pairwise(cu_seqlens.tolist()))
    return lengths, row_runs(lengths, lengths)


def cached_on(owner: Any, name: str, compute: Callable[[], T]) -> T:
    """Compute a value once for a tensor or a layout, as an attribute of it."""
    known = vars(owner)
    if name not in known:
        known[name] = compute()
    return known[name]


def _causal_rows(prompt: int, responses: Sequence[int]) -> list[int]:
    """Lengths of a group's causal rows: the prompt with its first response, and the other responses."""
    first, *others = [length for length in responses if length] or [0]
    return [prompt + first, *others]


def unsupported(rule: AttentionRule, longest_row: int) -> str | None:
    """Return why merged calls cannot follow a rule in sequences of up to `longest_row` tokens, or None."""
    if not rule.is_causal:
        return "attention to later tokens is not supported"
    if rule.window is not None and rule.window < longest_row:
        return (
            f"a sliding window of {rule.window} tokens is not supported for longer sequences (the longest"
            f" has {longest_row})"
        )
    return None
