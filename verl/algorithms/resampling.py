# SPDX-License-Identifier: Apache-2.0
"""Resample the batch by score (PF-PPO).

Source: "Policy Filtration for RLHF to Mitigate Noise in Reward Models" (https://arxiv.org/abs/2409.06957).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.utils.registry import Registry

MIN_WEIGHT = 1e-8  # all-zero weights would not be a distribution
WEIGHT_OF_BEST, WEIGHT_OF_OTHERS = 0.4, 0.1  # for `max_random`

ResamplingMethod = Callable[[Tensor, float], Tensor]
RESAMPLING_METHODS: Registry[ResamplingMethod] = Registry("algorithm.pf_ppo.reweight_method")


def resampling_weights(scores: Tensor, method: str, power: float) -> Tensor:
    """Return unnormalized sampling weights, (B,) float64, from the scores before a KL penalty."""
    if scores.dim() != 1 or len(scores) == 0:
        raise ValueError(f"scores to resample by must be a non-empty vector, got {tuple(scores.shape)}")
    if not scores.isfinite().all():
        raise ValueError(
            "scores to resample by must be finite, got NaN or infinity: check the reward function"
        )
    if power < 0:
        raise ValueError(f"`algorithm.pf_ppo.weight_pow` must be 0 or more, got {power}")
    return RESAMPLING_METHODS[method](scores.double(), power).clamp(min=MIN_WEIGHT)


@RESAMPLING_METHODS.register("pow")
def power_of_score(scores: Tensor, power: float) -> Tensor:
    """|score| ** power: prefers scores far from zero."""
    return scores.abs() ** power


@RESAMPLING_METHODS.register("max_min")
def extremes(scores: Tensor, power: float) -> Tensor:
    """1 for the best and the worst score of the batch, where reward models err least; 0 otherwise."""
    return ((scores == scores.max()) | (scores == scores.min())).double()


@RESAMPLING_METHODS.register("max_random")
def best_and_others(scores: Tensor, power: float) -> Tensor:
    """0.4 for the best score of the batch, 0.1 for all others."""
    return torch.where(scores == scores.max(), WEIGHT_OF_BEST, WEIGHT_OF_OTHERS).double()


def resample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw B row numbers with replacement, (B,) int64, with probabilities proportional to `weights` (B,)."""
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, factor: float) -> Tensor:
    """Penalty for responses close to the maximum length (soft overlong punishment), (B,) float32.

        penalty_i = -factor * clamp((length_i - (max_length - buffer_length)) / buffer_length, 0, 1)

    Lengths are in tokens.

    Source: DAPO, section 3.4, equation 13 (https://arxiv.org/abs/2503.14476).
    """
    if not 1 <= buffer_length <= max_length:
        raise ValueError(
            f"`worker.reward.overlong_buffer_length` must be from 1 to `data.max_response_length`"
            f" ({max_length}) to penalize, got {buffer_length}"
        )
    into_buffer = (lengths - (max_length - buffer_length)).float() / buffer_length  # (B,)
    return into_buffer.clamp(0.0, 1.0) * -factor
