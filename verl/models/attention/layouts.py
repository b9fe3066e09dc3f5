# SPDX-License-Identifier: Apache-2.0
"""Who sees whom on a line of packed tokens; every attention layer of a model asks the same layout.

- `PackedLayout`: rows behind each other, each of which sees itself.
- `SharedLayout`: groups, each a prompt and its responses; each response sees the prompt and itself.

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
    """What an attention layer needs to know of the tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attention of every token to the tokens that the layout and the rule let it see.

        Args:
            query: (1, H, N, D).
            key: (1, Hkv, N, D); Hkv divides H.
            value: (1, Hkv, N, D).
            rule: Causality, window, scale and soft cap.

        Returns:
            (1, N, H, D).
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where the rows of a packed batch begin, worked out once for all layers."""

    cu_seqlens: Tensor  # (B + 1,) int32
    runs: tuple[tuple[int, int], ...]  # (rows, length of each): neighbours of equal length together
    max_length: int

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> "PackedLayout":
        """The layout for row boundaries, remembered on the tensor: a tower asks again in every layer."""
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
        """Attention of every token to the tokens of its own row, see `Layout`."""
        return attend_rows(query, key, value, self.cu_seqlens, self.runs, self.max_length, rule)


@dataclass(frozen=True, eq=False)
class SharedLayout:
    """Groups behind each other: a prompt once, then its responses, each as if it alone followed the prompt.

    A causal call runs over the segments, where the first response continues the prompt's segment. A second
    call for each group lets its other responses see the whole prompt. A group of one response is a plain row.

    Example::

        SharedLayout.of([(5, [2, 3]), (4, [2])])  # p p p p p a a b b b  q q q q c c
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...]  # (prompt length, response lengths) of each
    cu_segments: Tensor  # (segments + 1,) int32: each prompt, and each response, empty ones included
    calls: tuple[AttentionCall, ...]
    longest_row: int  # prompt and response

    @classmethod
    def of(
        cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str | None = None
    ) -> "SharedLayout":
        """The layout of groups in the order of the line.

        Args:
            groups: The prompt's length and the lengths of its responses, which may be 0, for each group.
            device: Of the attention.

        Raises:
            ValueError: A prompt is empty, so that its responses have nothing to share.
        """
        if any(prompt < 1 for prompt, _ in groups):
            raise ValueError("a shared prompt has at least one token")
        held = tuple((prompt, tuple(responses)) for prompt, responses in groups)
        segments = [length for prompt, responses in held for length in (prompt, *responses)]
        rows = [length for group in held for length in _causal_rows(*group)]
        bounds = _bounds(rows, device)
        size = sum(segments)
        calls = [AttentionCall(0, size, 0, size, bounds, bounds, is_causal=True)]
        start = 0
        for prompt, responses in held:
            first, *others = _causal_rows(prompt, responses)
            stop = start + first + sum(others)
            if others:
                rows_q, rows_k = _bounds([sum(others)], device), _bounds([prompt], device)
                calls.append(
                    AttentionCall(start + first, stop, start, start + prompt, rows_q, rows_k, is_causal=False)
                )
            start = stop
        longest = max((prompt + max(responses, default=0) for prompt, responses in held), default=0)
        return cls(held, _bounds(segments, device), tuple(calls), longest)

    def refuses(self, rule: AttentionRule) -> str | None:
        """Why this layout cannot follow a rule; None if it can."""
        if not rule.is_causal:
            return "attention to later tokens would reach from one response into the next"
        if rule.softcap is not None:
            return "a soft cap of the scores is not supported behind a shared prompt"
        if rule.window is not None and rule.window < self.longest_row:
            return (
                f"a sliding window of {rule.window} tokens hides a part of the prompt that differs for each"
                f" token of a response (the longest sequence has {self.longest_row})"
            )
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attention of every token to its prompt and to its own response so far, see `Layout`.

        Raises:
            NotImplementedError: The layout `refuses` the rule.
        """
        refusal = self.refuses(rule)
        if refusal is not None:
            raise NotImplementedError(f"{refusal}: set `worker.actor.share_prompt` to false")
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, H, D) each
        return attend_calls(q, k, v, self.calls, rule.scale).unsqueeze(0)


def _causal_rows(prompt: int, responses: Sequence[int]) -> list[int]:
    """Lengths of a group's causal rows: the prompt with its first response, and the other responses."""
    first, *others = [length for length in responses if length] or [0]
    return [prompt + first, *others]


def _bounds(lengths: Sequence[int], device: torch.device | str | None) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
