# SPDX-License-Identifier: Apache-2.0
"""Which prompts a step trains on, by the scores of their responses.

A filter sees the scores of whole groups, (G, n), under `algorithm.filter_key`; nan is a response without a
score, which takes no part in its group. To add one: a class with the methods of `GroupFilter` and a line in
`make_group_filter`.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from verl.config.ppo import PPOConfig
from verl.trainer.metrics import Metrics


class GroupFilter(Protocol):
    """Decides which groups are worth training on."""

    def keep(self, scores: Tensor) -> Tensor:
        """Which groups stay: (G,) bool for scores (G, n)."""
        ...

    def metrics(self, sampled: Tensor, trained: Tensor) -> Metrics:
        """Counts for the groups that a step sampled, (G, n), and for those it trains on, (K, n)."""
        ...

    def reasons(self, sampled: Tensor) -> str:
        """Why groups were left out, and what to change, as the end of an error message."""
        ...


@dataclass(frozen=True)
class MeanScoreFilter:
    """Keeps groups whose mean score lies strictly between two bounds (dynamic sampling).

    With scores of 0 and 1 and bounds next to them, that leaves out prompts which all responses solve or none.

    Source: DAPO, section 3.2 (https://arxiv.org/abs/2503.14476).
    """

    key: str
    low: float
    high: float

    def keep(self, scores: Tensor) -> Tensor:
        """Which groups stay: (G,) bool for scores (G, n)."""
        means = scores.nanmean(-1)
        return (means > self.low) & (means < self.high)

    def metrics(self, sampled: Tensor, trained: Tensor) -> Metrics:
        """`filter/too_low` and `filter/too_high`: left out; `filter/all_equal`: any group of equal scores."""
        return {f"filter/{name}": float(count) for name, count in self._counts(sampled).items()}

    def reasons(self, sampled: Tensor) -> str:
        """Why groups were left out, and what to change."""
        counts = self._counts(sampled)
        if counts["too_low"] >= counts["too_high"]:
            remedy = (
                "the prompts are too hard, or the reward function does not recognise what the policy writes:"
                " choose easier prompts or lower `algorithm.filter_low`"
            )
        else:
            remedy = "the prompts are too easy: choose harder ones or raise `algorithm.filter_high`"
        return (
            f"{counts['too_low']} too hard (mean `{self.key}` at most {self.low}), {counts['too_high']} too"
            f" easy (at least {self.high}), {counts['all_equal']} with equal scores: {remedy}"
        )

    def _counts(self, scores: Tensor) -> dict[str, int]:
        means = scores.nanmean(-1)
        return {
            "too_low": int((means <= self.low).sum()),
            "too_high": int((means >= self.high).sum()),
            "all_equal": int(all_equal(scores).sum()),
        }


@dataclass(frozen=True)
class EqualScoresFilter:
    """Leaves out groups whose responses all score the same: they have no advantage to learn from.

    Source: Skywork-OR1, rejection of groups without advantage (https://arxiv.org/abs/2505.22312).
    """

    key: str

    def keep(self, scores: Tensor) -> Tensor:
        """Which groups stay: (G,) bool for scores (G, n)."""
        return ~all_equal(scores)

    def metrics(self, sampled: Tensor, trained: Tensor) -> Metrics:
        """`batch/*` of the groups trained on, and the same with `_before_rs` of all that were sampled."""
        before = {f"{name}_before_rs": value for name, value in solve_metrics(sampled).items()}
        return solve_metrics(trained) | before

    def reasons(self, sampled: Tensor) -> str:
        """Why groups were left out, and what to change."""
        counts = solve_metrics(sampled)
        return (
            f"{counts['batch/solve_none']:.0f} solved by no response (every `{self.key}` at most 0),"
            f" {counts['batch/solve_all']:.0f} by all (at least 1), {int(all_equal(sampled).sum())} with"
            " equal scores: choose prompts of other difficulty, raise `worker.rollout.n` or"
            " `worker.rollout.temperature`"
        )


def make_group_filter(config: PPOConfig) -> GroupFilter | None:
    """Return the filter that the options ask for; None keeps every group."""
    algorithm = config.algorithm
    if algorithm.online_filtering:
        return MeanScoreFilter(algorithm.filter_key, algorithm.filter_low, algorithm.filter_high)
    return EqualScoresFilter(algorithm.filter_key) if config.trainer.rejection_sample else None


def all_equal(scores: Tensor) -> Tensor:
    """Whether the responses of a group all score the same, or none has a score: (G,) bool for (G, n)."""
    highest = scores.masked_fill(scores.isnan(), -math.inf).amax(-1)
    lowest = scores.masked_fill(scores.isnan(), math.inf).amin(-1)
    return highest <= lowest


def solve_metrics(scores: Tensor) -> Metrics:
    """How many groups no response solves (all scores at most 0), and all do (all at least 1).

    Args:
        scores: (G, n); the shares are zero without a group.

    Returns:
        `batch/solve_none`, `batch/solve_all`, both as `_ratio`, and `batch/without_adv_ratio`: the share of
        groups with equal scores.
    """
    total = max(len(scores), 1)
    has_scores = ~scores.isnan().all(-1)  # (G,)
    none = (has_scores & ~(scores > 0).any(-1)).sum().item()
    every = (has_scores & ~(scores < 1).any(-1)).sum().item()
    return {
        "batch/solve_none": float(none),
        "batch/solve_all": float(every),
        "batch/solve_none_ratio": none / total,
        "batch/solve_all_ratio": every / total,
        "batch/without_adv_ratio": all_equal(scores).sum().item() / total,
    }


@dataclass(frozen=True)
class Quota:
    """How many prompts a step takes, and how hard it tries.

    Attributes:
        target: Prompts of a step at most: `data.rollout_batch_size`.
        multiple: A step's prompts are a multiple of it, and so at least that many.
        oversampling: Prompts sampled for each one that is missing, before a step makes do with fewer.
        max_calls: Calls of the engine after which a step gives up; 0 is never.
        prompts_per_call: Prompts of one call at most; None sets no limit.
    """

    target: int
    multiple: int
    oversampling: int = 1
    max_calls: int = 0
    prompts_per_call: int | None = None

    def wanted(self, num_kept: int) -> int:
        """Prompts to sample for a step that has `num_kept` groups to begin with."""
        return max(self.target - num_kept, 0) * self.oversampling

    def has_enough(self, num_kept: int, num_sampled: int, wanted: int) -> bool:
        """Whether a step that sampled `num_sampled` of the `wanted` prompts stops here."""
        return num_kept >= self.target or (num_sampled >= wanted and num_kept >= self.multiple)

    def gives_up(self, calls: int) -> bool:
        """Whether no more calls are allowed."""
        return 0 < self.max_calls <= calls

    def usable(self, num_kept: int) -> int:
        """How many of the kept groups the step trains on."""
        return min(num_kept, self.target) // self.multiple * self.multiple


def make_quota(config: PPOConfig) -> Quota:
    """Return the quota of a run: online filtering fills a step, rejection fills whole mini batches."""
    prompts, trainer = config.data.rollout_batch_size, config.trainer
    mini_batch = math.lcm(*(role.global_batch_size for role in config.trained_roles.values()))
    return Quota(
        target=prompts,
        multiple=mini_batch if trainer.rejection_sample else prompts,
        oversampling=trainer.rejection_sample_multiplier if trainer.rejection_sample else 1,
        max_calls=max(trainer.max_try_make_batch, 0),
        prompts_per_call=config.data.mini_rollout_batch_size,
    )
