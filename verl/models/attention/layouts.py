# SPDX-License-Identifier: Apache-2.0
"""Attention layouts: which packed tokens attend to which; all layers of a model share one layout.

- `PackedLayout`: concatenated sequences that attend to themselves.
- `SharedLayout`: groups of a prompt and its responses; a response attends to the prompt and itself.

To add a layout, write a class with `attend`; `sequence_parallel_layouts` has those that span processes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.models.attention.partial_attention import AttentionCall, attend_calls
from verl.models.attention.row_attention import AttentionRule, attend_rows


class Layout(Protocol):
    """The attention pattern of packed tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Compute attention of (1, H, N, D) queries to (1, Hkv, N, D) keys and values: (1, N, H, D)."""
        ...


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Concatenated sequences; computed once for all layers."""

    cu_seqlens: Tensor  # (B + 1,) int32
    runs: tuple[tuple[int, int], ...]  # (number, length) of adjacent sequences with equal lengths
    max_length: int

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> "PackedLayout":
        """Return the layout of `cu_seqlens`, cached on the tensor for the other layers."""
        known = getattr(cu_seqlens, "packed_layout", None)
        if known is not None:
            return known
        bounds = cu_seqlens.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(bounds) if stop > start]
        runs: list[tuple[int, int]] = []
        for length in lengths:
            if runs and runs[-1][1] == length:
                runs[-1] = (runs[-1][0] + 1, length)
            else:
                runs.append((1, length))
        layout = cls(cu_seqlens.to(torch.int32), tuple(runs), max(lengths, default=0))
        setattr(cu_seqlens, "packed_layout", layout)  # noqa: B010 (tensors declare no such attribute)
        return layout

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        return attend_rows(query, key, value, self.cu_seqlens, self.runs, self.max_length, rule)


@dataclass(frozen=True, eq=False)
class SharedLayout:
    """Concatenated groups of a prompt and its responses; responses do not attend to each other.

    Example::

        SharedLayout.of([(5, [2, 3]), (4, [2])])  # p p p p p a a b b b  q q q q c c
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...]  # (prompt length, response lengths) of each
    cu_segments: Tensor  # (segments + 1,) int32: each prompt and each response, including empty ones
    # A causal call over the segments, where the first response continues the prompt's segment, and for each
    # group a call of its other responses to the whole prompt.
    calls: tuple[AttentionCall, ...]
    longest_row: int  # prompt and response

    @classmethod
    def of(
        cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str | None = None
    ) -> "SharedLayout":
        """Build the layout of groups (prompt length, response lengths), which may include empty responses."""
        if any(prompt < 1 for prompt, _ in groups):
            raise ValueError("a shared prompt has at least one token")
        held = tuple((prompt, tuple(responses)) for prompt, responses in groups)
        segments = [length for prompt, responses in held for length in (prompt, *responses)]
        rows = [length for group in held for length in _causal_rows(*group)]
        bounds = cu_seqlens_of(rows, device)
        size = sum(segments)
        calls = [AttentionCall(0, size, 0, size, bounds, bounds, is_causal=True)]
        start = 0
        for prompt, responses in held:
            first, *others = _causal_rows(prompt, responses)
            stop = start + first + sum(others)
            if others:
                rows_q, rows_k = cu_seqlens_of([sum(others)], device), cu_seqlens_of([prompt], device)
                calls.append(
                    AttentionCall(start + first, stop, start, start + prompt, rows_q, rows_k, is_causal=False)
                )
            start = stop
        longest = max((prompt + max(responses, default=0) for prompt, responses in held), default=0)
        return cls(held, cu_seqlens_of(segments, device), tuple(calls), longest)

    def unsupported(self, rule: AttentionRule) -> str | None:
        """Return why this layout cannot follow a rule; None if it can."""
        if not rule.is_causal:
            return "attention to later tokens would mix responses"
        if rule.softcap is not None:
            return "a soft cap of the scores is not supported with a shared prompt"
        if rule.window is not None and rule.window < self.longest_row:
            return (
                f"a sliding window of {rule.window} tokens hides a different part of the prompt from each"
                f" token of a response (the longest sequence has {self.longest_row})"
            )
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        refusal = self.unsupported(rule)
        if refusal is not None:
            raise NotImplementedError(f"{refusal}: set `worker.actor.share_prompt` to false")
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, H, D) each
        return attend_calls(q, k, v, self.calls, rule.scale).unsqueeze(0)


def _causal_rows(prompt: int, responses: Sequence[int]) -> list[int]:
    """Lengths of a group's causal rows: the prompt with its first response, and the other responses."""
    first, *others = [length for length in responses if length] or [0]
    return [prompt + first, *others]


def cu_seqlens_of(lengths: Sequence[int], device: torch.device | str | None) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
