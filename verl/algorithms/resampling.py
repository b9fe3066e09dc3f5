# SPDX-License-Identifier: Apache-2.0
"""Drawing the sequences of a batch anew, those that teach more oftener: PF-PPO.

Source: "Policy Filtration for RLHF to Mitigate Noise in Reward Models" (https://arxiv.org/abs/2409.06957).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.utils.registry import Registry

MIN_WEIGHT = 1e-8  # every sequence can be drawn: weights that are all zero are no distribution
WEIGHT_OF_BEST, WEIGHT_OF_OTHERS = 0.4, 0.1  # of `max_random`

ResamplingMethod = Callable[[Tensor, float], Tensor]
RESAMPLING_METHODS: Registry[ResamplingMethod] = Registry("algorithm.pf_ppo.reweight_method")


def resampling_weights(scores: Tensor, method: str, power: float) -> Tensor:
    """Give each sequence the weight that it is drawn with, at least 1e-8.

    Args:
        scores: (B,), sum of each sequence's token level scores, before a KL penalty.
        method: A name in `RESAMPLING_METHODS`.
        power: Of `pow`, 0 or more; the others do not read it.

    Returns:
        (B,) float64, not normalised.

    Raises:
        ValueError: The method is unknown, the power negative, the batch empty, or a score not finite.
    """
    if scores.dim() != 1 or len(scores) == 0:
        raise ValueError(f"scores to resample by must be (B,) with B of 1 or more, got {tuple(scores.shape)}")
    if not scores.isfinite().all():
        raise ValueError(
            "scores to resample by must be finite, got NaN or infinity: check the reward function"
        )
    if power < 0:
        raise ValueError(f"`algorithm.pf_ppo.weight_pow` must be 0 or more, got {power}")
    return RESAMPLING_METHODS[method](scores.double(), power).clamp(min=MIN_WEIGHT)


@RESAMPLING_METHODS.register("pow")
def power_of_score(scores: Tensor, power: float) -> Tensor:
    """|score| ** power: what scores far from zero is drawn oftener."""
    return scores.abs() ** power


@RESAMPLING_METHODS.register("max_min")
def extremes(scores: Tensor, power: float) -> Tensor:
    """One for the best and the worst score of the batch, where reward models err least; zero between."""
    return ((scores == scores.max()) | (scores == scores.min())).double()


@RESAMPLING_METHODS.register("max_random")
def best_and_others(scores: Tensor, power: float) -> Tensor:
    """0.4 for the best score of the batch, 0.1 for all others."""
    return torch.where(scores == scores.max(), WEIGHT_OF_BEST, WEIGHT_OF_OTHERS).double()


def resample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw as many rows as there are, with replacement, each with a chance in proportion to its weight.

    Args:
        weights: (B,), all above zero.
        generator: Where the chance comes from; the same state gives the same rows.

    Returns:
        (B,) int64 row numbers, in the order of drawing.
    """
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
