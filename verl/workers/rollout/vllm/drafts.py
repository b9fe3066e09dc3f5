# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in vLLM: counts of drafted and accepted tokens, and resets of the drafter."""

import functools
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.interface import Drafts


def count_drafts(scheduler: Any) -> dict[str, Drafts]:
    """Count what an engine's scheduler learns of drafts; vLLM itself does so only if it logs statistics.

    Returns the counts of requests so far, by vLLM's names of them; take those of finished ones out.
    """
    counts: dict[str, Drafts] = {}
    theirs = scheduler.make_spec_decoding_stats

    @functools.wraps(theirs)
    def counting(
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> Any:
        name = request_id.partition("-")[0]  # vLLM appends a dash and random digits to ours
        counts[name] = counts.get(name, Drafts()).plus(num_draft_tokens, num_accepted_tokens)
        return theirs(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    scheduler.make_spec_decoding_stats = counting
    return counts


def forget_responses(runner: Any) -> None:
    """Draft from responses of the coming weights only.

    A resumed run has no older ones, and would draw other random numbers.
    """
    drafter = getattr(runner, "drafter", None)
    cache = getattr(drafter, "suffix_cache", None)
    if drafter is not None and cache is not None:
        drafter.suffix_cache = type(cache)(
            max_tree_depth=cache.max_tree_depth, max_cached_requests=cache.max_cached_requests
        )


def expand_to_tokens(
    values: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat a value (B,) for each drafted token of its request, (num_tokens,).

    Args:
        cu_num_tokens: Sums of the requests' tokens, (B,).
        replace_from: Value that becomes `replace_to`, if these differ.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))  # (B,)
    if replace_from != replace_to:
        values = values.masked_fill(values == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
