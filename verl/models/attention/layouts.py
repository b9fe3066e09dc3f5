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

from verl.models.attention.blocks import Blocks
from verl.models.attention.kernels import AttentionRule, RowRun, row_runs
from verl.models.attention.partial_attention import AttentionCall, Span, attend_calls
from verl.models.attention.row_attention import attend_runs, is_local, local_call
from verl.models.attention.varlen_kernels import kernel_for
from verl.models.linear_attention.recurrence import Recurrence, group_segments, row_segments

T = TypeVar("T")


class Layout(Protocol):
    """The attention pattern of packed tokens."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention of (1, H, N, D) queries to (1, Hkv, N, D) keys and values: (1, N, H, D).

        `sinks` (H,) are scores of a further key of each head, whose value is zero.
        """
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
    later: "LaterTokens | None" = None  # of blocks

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, device: torch.device | str | None = None, blocks: Blocks | None = None
    ) -> "PackedLayout":
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
        later = LaterTokens.of(blocks, lengths, device)
        return cls(Span(slice(0, sum(lengths)), on_device, lengths), runs, later)

    @property
    def cu_seqlens(self) -> Tensor:
        return self.sequences.cu_rows

    @property
    def recurrence(self) -> Recurrence:
        lengths, device = self.sequences.lengths, self.cu_seqlens.device
        return cached_on(self, "_recurrence", lambda: Recurrence(row_segments(lengths), device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        rows = AttentionCall(self.sequences, self.sequences, rule.is_causal, self.runs)
        if rule.chunk is not None and rule.chunk < max(self.sequences.lengths, default=0):
            groups = [(length, ()) for length in self.sequences.lengths]
            rows = _local_call(self, groups, rule, self.sequences)
        later = later_calls(self.later, rule)
        # A soft cap recomputes its scores in backward, so that no scores of a long sequence are kept.
        is_plain = not later and sinks is None and rule.softcap is None
        if is_plain and kernel_for(query, value, None) is None:
            return attend_runs(query, key, value, rows.runs, rule)
        return _attend(query, key, value, (rows, *later), rule, sinks)


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
    later: "LaterTokens | None" = None  # of blocks
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ()  # prompt length and response lengths

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str | None = None,
        blocks: Blocks | None = None,
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
        segments = [length for prompt, responses in groups for length in (prompt, *responses)]
        own = tuple((prompt, tuple(responses)) for prompt, responses in groups)
        return cls(tuple(calls), longest, LaterTokens.of(blocks, segments, device), own)

    @property
    def recurrence(self) -> Recurrence:
        device = self.calls[0].queries.cu_rows.device
        return cached_on(self, "_recurrence", lambda: Recurrence(group_segments(self.groups), device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        if not rule.is_causal:
            raise NotImplementedError(
                "with a shared prompt, attention to later tokens is not supported: set"
                " `worker.actor.share_prompt` to false"
            )
        calls = self.calls
        if is_local(rule, self.longest_row):
            calls = (_local_call(self, self.groups, rule, calls[0].queries),)
        return _attend(query, key, value, (*calls, *later_calls(self.later, rule)), rule, sinks)


@dataclass(frozen=True, eq=False)
class LaterTokens:
    """The call of tokens of blocks to the later tokens of their block."""

    call: AttentionCall
    layer_types: frozenset[str]  # of the layers that make it

    @classmethod
    def of(
        cls, blocks: Blocks | None, segments: Sequence[int], device: torch.device | str | None
    ) -> "LaterTokens | None":
        rows = blocks.within(segments).rows_of_later_tokens() if blocks is not None else ()
        if blocks is None or not rows:
            return None
        queries, keys = Span.of_all(rows, device)
        return cls(AttentionCall.of(queries, keys, is_causal=False, sees_later=True), blocks.layer_types)


def _local_call(
    layout: Layout, groups: Sequence[tuple[int, Sequence[int]]], rule: AttentionRule, tokens: Span
) -> AttentionCall:
    """Return the call for a window or chunks over a layout's tokens, which is made once."""
    known: dict[tuple[int | None, int | None], AttentionCall] = cached_on(layout, "_local", dict)
    key = rule.window, rule.chunk
    if key not in known:
        known[key] = local_call(groups, rule, tokens.cu_rows.device)
    return known[key]


def later_calls(later: LaterTokens | None, rule: AttentionRule) -> tuple[AttentionCall, ...]:
    """Return the call of blocks in a layer where they have an effect."""
    if later is None or not rule.is_causal or rule.layer_type not in later.layer_types:
        return ()
    return (later.call,)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    calls: Sequence[AttentionCall],
    rule: AttentionRule,
    sinks: Tensor | None,
) -> Tensor:
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (N, H, D) each
    return attend_calls(q, k, v, calls, rule, sinks).unsqueeze(0)


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
