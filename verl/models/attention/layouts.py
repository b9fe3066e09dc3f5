# SPDX-License-Identifier: Apache-2.0
"""Attention layouts: which packed tokens attend to which; all layers of a model share one layout.

In a `PackedLayout` sequences attend to themselves, and a response to its prompt and to itself. Tokens of
`Blocks` also attend to later tokens, and layers may have a window or chunks.

To add a layout, write a class with `attend`; `sequence_parallel_layouts` has the layouts that span processes.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from verl.models.attention.kernels import FULL, SLIDING, AttentionRule, RowRun, attend_runs, row_runs
from verl.models.attention.partial_attention import AttentionCall, Span, attend_calls
from verl.models.attention.varlen_kernels import kernel_for
from verl.models.linear_attention.recurrence import Recurrence, group_segments

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


class Blocks(NamedTuple):
    """Blocks of packed tokens that attend to each other in both directions, such as those of an image.

    A causal call, with a window or not, covers a block's own and earlier tokens; a further call lets each
    token of a block attend to the block's later ones.

    Example::

        Blocks.of(media_tokens, {"sliding_attention"})  # an image is a run of adjacent media tokens
        Blocks(((3, 7), (12, 16)))  # tokens 3 to 6 and 12 to 15
    """

    bounds: tuple[tuple[int, int], ...]  # first token and the one after the last, in ascending order
    layer_types: frozenset[str] = frozenset({FULL, SLIDING})  # of the layers where blocks have an effect

    @classmethod
    def of(cls, tokens: Tensor, layer_types: Collection[str] = (FULL, SLIDING)) -> "Blocks":
        """Find the runs of adjacent tokens among (n,) packed positions in ascending order, on CPU."""
        breaks = (tokens.diff() != 1).nonzero()[:, 0] + 1
        parts = torch.tensor_split(tokens, breaks.tolist()) if len(tokens) else ()
        bounds = tuple((int(part[0]), int(part[-1]) + 1) for part in parts)
        return cls(bounds, frozenset(layer_types))

    def within(self, segments: Sequence[int]) -> "Blocks":
        """Cut blocks where segments of these lengths end, so that no token sees those of another."""
        ends = torch.tensor(segments).cumsum(0).tolist()
        bounds: list[tuple[int, int]] = []
        remaining = iter(ends)
        end = next(remaining, 0)
        for start, stop in self.bounds:
            while start < stop:
                while end <= start:
                    end = next(remaining)
                bounds.append((start, min(stop, end)))
                start = min(stop, end)
        return self._replace(bounds=tuple(bounds))

    def rows_of_later_tokens(self) -> tuple[tuple[int, list[int]], ...]:
        """Return (first token, row lengths) of queries and of keys: tokens of blocks and the later ones.

        Query t of a block's row is its token t and key t its token t + 1, so that a query attends to keys
        from its own position in the row on. Other tokens are in rows that have only queries or only keys.
        Without blocks of two or more tokens there are no rows.
        """
        bounds = [(start, stop) for start, stop in self.bounds if stop - start > 1]
        if not bounds:
            return ()
        queries, keys, end = [], [], bounds[0][0]
        for start, stop in bounds:
            between = start - end
            if between:
                queries += [between, 0]
                keys += [0, between]
            queries.append(stop - 1 - start)
            keys.append(stop - 1 - start)
            end = stop - 1
        return (bounds[0][0], queries), (bounds[0][0] + 1, keys)


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Concatenated sequences, or groups of a prompt and its responses, which do not attend to each other.

    Example::

        PackedLayout.of(torch.tensor([0, 3, 5]))  # a a a b b
        PackedLayout.of_groups([(5, [2, 3]), (4, [2])])  # p p p p p a a b b b  q q q q c c
    """

    # A causal call over the segments, where the first response continues the prompt's segment, and for each
    # group a call of its other responses to the whole prompt.
    calls: tuple[AttentionCall, ...]
    groups: tuple[tuple[int, tuple[int, ...]], ...]  # prompt length and response lengths
    later: Mapping[str, AttentionCall]  # of blocks' tokens to later ones, by type of layer

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
                cu_seqlens, f"rows_on_{device}", lambda: cu_seqlens.to(device, torch.int32, non_blocking=True)
            )
        rows = Span(slice(0, sum(lengths)), on_device, lengths)
        groups = tuple((length, ()) for length in lengths)
        call = AttentionCall(rows, rows, True, runs)
        return cls((call,), groups, _later_calls(blocks, lengths, device))

    @classmethod
    def of_groups(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str | None = None,
        blocks: Blocks | None = None,
    ) -> "PackedLayout":
        """Build the layout of groups (prompt length, response lengths), which may include empty responses."""
        if any(responses and prompt < 1 for prompt, responses in groups):
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
        segments = [length for prompt, responses in groups for length in (prompt, *responses)]
        own = tuple((prompt, tuple(responses)) for prompt, responses in groups)
        return cls(tuple(calls), own, _later_calls(blocks, segments, device))

    @property
    def recurrence(self) -> Recurrence:
        device = self.calls[0].queries.cu_rows.device
        return cached_on(self, "_recurrence", lambda: Recurrence(group_segments(self.groups), device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        calls = self._calls(rule)
        later = [self.later[rule.layer_type]] if rule.is_causal and rule.layer_type in self.later else []
        # A soft cap recomputes its scores in backward, so that no scores of a long sequence are kept.
        is_plain = not later and sinks is None and rule.softcap is None
        is_plain = is_plain and len(calls) == 1 and calls[0].taken is None
        if is_plain and kernel_for(query, value, None) is None:
            return attend_runs(query, key, value, calls[0].runs, rule)
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (N, H, D) each
        return attend_calls(q, k, v, (*calls, *later), rule, sinks).unsqueeze(0)

    def _calls(self, rule: AttentionRule) -> tuple[AttentionCall, ...]:
        """Return the calls of a layer with this rule; those for a window or chunks are made once."""
        shares = len(self.calls) > 1
        if shares and not rule.is_causal:
            raise NotImplementedError(
                "with a shared prompt, attention to later tokens is not supported: set"
                " `worker.actor.share_prompt` to false"
            )
        # without other responses to the same prompt the first call follows a window
        sizes = [size for size in (rule.chunk, rule.window if shares else None) if size is not None]
        if sizes and min(sizes) < self.longest_row:
            known: dict[tuple[int | None, int | None], AttentionCall] = cached_on(self, "_local", dict)
            key = rule.window, rule.chunk
            if key not in known:
                known[key] = _local_rows(self.groups, rule, self.calls[0].queries.cu_rows.device)
            return (known[key],)
        return self.calls if rule.is_causal else (self.calls[0]._replace(is_causal=False),)

    @property
    def longest_row(self) -> int:
        """The tokens of the longest prompt with a response."""
        return max((prompt + max(responses, default=0) for prompt, responses in self.groups), default=0)


def _rows_within(cu_seqlens: Tensor) -> tuple[tuple[int, ...], tuple[RowRun, ...]]:
    lengths = tuple(stop - start for start, stop in itertools.pairwise(cu_seqlens.tolist()))
    return lengths, row_runs(lengths, lengths)


def _later_calls(
    blocks: Blocks | None, segments: Sequence[int], device: torch.device | str | None
) -> dict[str, AttentionCall]:
    """Return the call of tokens of blocks to the later tokens of their block, by the types of its layers."""
    rows = blocks.within(segments).rows_of_later_tokens() if blocks is not None else ()
    if blocks is None or not rows:
        return {}
    queries, keys = Span.of_all(rows, device)
    call = AttentionCall.of(queries, keys, is_causal=False, sees_later=True)
    return dict.fromkeys(blocks.layer_types, call)


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


class _Part(NamedTuple):
    """Adjacent packed tokens that may attend to each other, as far as they are not later."""

    start: int  # the first query
    queries: int
    before: tuple[int, int]  # tokens of the prompt that come before the queries' own keys: start and stop


def _local_rows(
    groups: Sequence[tuple[int, Sequence[int]]], rule: AttentionRule, device: torch.device | str | None
) -> AttentionCall:
    """Return the call that covers all packed tokens of groups (prompt length, response lengths).

    A response that sees the end of a shared prompt has a row whose keys start with a copy of the prompt's
    last ones; the row's queries are at the end of its keys.
    """
    parts = [part for part in _parts(groups, rule) if part.queries]
    copied = [stop - start for start, stop in (part.before for part in parts)]
    lengths = [part.queries for part in parts]
    keys = [more + length for more, length in zip(copied, lengths, strict=True)]
    queries, all_keys = Span.of_all([(0, lengths), (0, keys)], device)
    if not any(copied):
        return AttentionCall.of(queries, queries, is_causal=True)
    taken: list[Tensor] = []
    for part in parts:
        taken += [torch.arange(*part.before), torch.arange(part.start, part.start + part.queries)]
    index = torch.cat(taken).to(device or "cpu", non_blocking=True)
    return AttentionCall.of(queries, all_keys, is_causal=True, taken=index)


def _parts(groups: Sequence[tuple[int, Sequence[int]]], rule: AttentionRule) -> Iterator[_Part]:
    start = 0
    for prompt, responses in groups:
        first, *others = _causal_rows(prompt, responses)
        yield from _following(start, 0, first, rule, start)
        at = start + first
        for length in others:
            yield from _following(start, prompt, length, rule, at)
            at += length
        start = at


def _following(prompt_start: int, prompt: int, length: int, rule: AttentionRule, at: int) -> Iterator[_Part]:
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
        yield _Part(at + position - prompt, size, (end - seen, end))
        position += size
