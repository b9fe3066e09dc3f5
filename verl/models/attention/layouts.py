# SPDX-License-Identifier: Apache-2.0
"""Attention layouts: which packed tokens attend to which; all layers of a model share one layout.

- `PackedLayout`: concatenated sequences that attend to themselves.
- `SharedLayout`: groups of a prompt and its responses; a response attends to the prompt and itself.

To add a layout, write a class with `attend`; `sequence_parallel_layouts` has the layouts that span processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.models.attention.kernels import RowRun, row_runs
from verl.models.attention.partial_attention import AttentionCall, Span, attend_calls
from verl.models.attention.row_attention import AttentionRule, attend_rows


class Layout(Protocol):
    """The attention pattern of packed tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Compute attention of (1, H, N, D) queries to (1, Hkv, N, D) keys and values: (1, N, H, D)."""
        ...


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Concatenated sequences."""

    cu_seqlens: Tensor  # (B + 1,) int32
    runs: tuple[RowRun, ...]  # of sequences with equal lengths

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> "PackedLayout":
        return cls(cu_seqlens.to(torch.int32), row_runs(cu_seqlens, cu_seqlens))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        return attend_rows(query, key, value, self.cu_seqlens, self.runs, rule)


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

    @classmethod
    def of(
        cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str | None = None
    ) -> "SharedLayout":
        """Build the layout of groups (prompt length, response lengths), which may include empty responses."""
        if any(prompt < 1 for prompt, _ in groups):
            raise ValueError("a shared prompt has at least one token")
        rows = [length for group in groups for length in _causal_rows(*group)]
        everything = Span.of(0, rows, device)
        calls = [AttentionCall(everything, everything, is_causal=True)]
        start = 0
        for prompt, responses in groups:
            first, *others = _causal_rows(prompt, responses)
            if others:
                queries = Span.of(start + first, [sum(others)], device)
                calls.append(AttentionCall(queries, Span.of(start, [prompt], device), is_causal=False))
            start += first + sum(others)
        longest = max((prompt + max(responses, default=0) for prompt, responses in groups), default=0)
        return cls(tuple(calls), longest)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        refusal = unsupported(rule, self.longest_row)
        if refusal is not None:
            raise NotImplementedError(
                f"with a shared prompt, {refusal}: set `worker.actor.share_prompt` to false"
            )
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, H, D) each
        return attend_calls(q, k, v, self.calls, rule.scale).unsqueeze(0)


def _causal_rows(prompt: int, responses: Sequence[int]) -> list[int]:
    """Lengths of a group's causal rows: the prompt with its first response, and the other responses."""
    first, *others = [length for length in responses if length] or [0]
    return [prompt + first, *others]


def unsupported(rule: AttentionRule, longest_row: int) -> str | None:
    """Return why merged calls cannot follow a rule in sequences of up to `longest_row` tokens, or None."""
    if not rule.is_causal:
        return "attention to later tokens is not supported"
    if rule.softcap is not None:
        return "a soft cap of the scores is not supported"
    if rule.window is not None and rule.window < longest_row:
        return (
            f"a sliding window of {rule.window} tokens is not supported for longer sequences (the longest"
            f" has {longest_row})"
        )
    return None
