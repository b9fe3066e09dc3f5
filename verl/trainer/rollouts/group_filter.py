# SPDX-License-Identifier: Apache-2.0
"""Select the prompts that a step trains on, by the scores of their responses.

A filter sees the scores of whole groups, (G, n), under `algorithm.filter_key`; nan is a response without a
score, which is ignored. To add one: a class with the same methods in `GroupFilter` and `make_group_filter`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from verl.config.algorithm import AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.ppo import TrainerConfig
from verl.trainer.metrics import Metrics


@dataclass(frozen=True)
class MeanScoreFilter:
    """Keeps groups whose mean score is strictly between two bounds (dynamic sampling).

    With scores of 0 and 1 and bounds next to them, this drops prompts that all or no responses solve.

    Source: DAPO, section 3.2 (https://arxiv.org/abs/2503.14476).
    """

    key: str
    low: float
    high: float

    def keep(self, scores: Tensor) -> Tensor:
        """Return the groups to keep, (G,) bool for scores (G, n)."""
        means = scores.nanmean(-1)
        return (means > self.low) & (means < self.high)

    def metrics(self, sampled: Tensor, trained: Tensor) -> Metrics:
        """Count the groups that a step sampled, (G, n), and those it trains on, (K, n)."""
        return {f"filter/{name}": float(count) for name, count in self._counts(sampled).items()}

    def reasons(self, sampled: Tensor) -> str:
        """Explain why groups were left out, and what to change, as the end of an error message."""
        counts = self._counts(sampled)
        if counts["too_low"] >= counts["too_high"]:
            remedy = (
                "the prompts are too hard, or the reward function does not recognize the responses:"
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
    """Drops groups whose responses all score the same, which have no advantage to learn from.

    Source: Skywork-OR1, rejection of groups without advantage (https://arxiv.org/abs/2505.22312).
    """

    key: str

    def keep(self, scores: Tensor) -> Tensor:
        return ~all_equal(scores)

    def metrics(self, sampled: Tensor, trained: Tensor) -> Metrics:
        """`batch/*` of the groups trained on, and `batch/*_before_rs` of all that were sampled."""
        before = {f"{name}_before_rs": value for name, value in solve_metrics(sampled).items()}
        return solve_metrics(trained) | before

    def reasons(self, sampled: Tensor) -> str:
        counts = solve_metrics(sampled)
        return (
            f"{counts['batch/solve_none']:.0f} solved by no response (every `{self.key}` at most 0),"
            f" {counts['batch/solve_all']:.0f} by all (at least 1), {int(all_equal(sampled).sum())} with"
            " equal scores: choose prompts of other difficulty, raise `worker.rollout.n` or"
            " `worker.rollout.temperature`"
        )


GroupFilter = MeanScoreFilter | EqualScoresFilter


def make_group_filter(algorithm: AlgorithmConfig, rejection_sample: bool) -> GroupFilter | None:
    """Return the filter of a run; None keeps every group."""
    if algorithm.online_filtering:
        return MeanScoreFilter(algorithm.filter_key, algorithm.filter_low, algorithm.filter_high)
    return EqualScoresFilter(algorithm.filter_key) if rejection_sample else None


def all_equal(scores: Tensor) -> Tensor:
    """Find the groups, (G,) bool for (G, n), whose responses all score the same or have no score."""
    highest = scores.masked_fill(scores.isnan(), -math.inf).amax(-1)
    lowest = scores.masked_fill(scores.isnan(), math.inf).amin(-1)
    return highest <= lowest


def solve_metrics(scores: Tensor) -> Metrics:
    """Count groups that no response solves (all scores at most 0) and that all solve (all at least 1)."""
    total = max(len(scores), 1)  # without a group all ratios are zero
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
    """The number of prompts of a step, and the effort to get them."""

    target: int  # prompts of a step at most: `data.rollout_batch_size`
    multiple: int  # divides the prompts of a step, which has at least that many
    oversampling: int = 1  # prompts sampled for each missing one
    max_calls: int = 0  # calls of the engine in a step; 0 is without limit
    prompts_per_call: int | None = None  # None is without limit

    def wanted(self, num_kept: int) -> int:
        return max(self.target - num_kept, 0) * self.oversampling

    def has_enough(self, num_kept: int, num_sampled: int, wanted: int) -> bool:
        # A step that sampled all the prompts it wanted trains on fewer than its target.
        return num_kept >= self.target or (num_sampled >= wanted and num_kept >= self.multiple)

    def is_exhausted(self, calls: int) -> bool:
        return 0 < self.max_calls <= calls

    def usable(self, num_kept: int) -> int:
        return min(num_kept, self.target) // self.multiple * self.multiple


def make_quota(data: DataConfig, trainer: TrainerConfig, mini_batch_prompts: Iterable[int]) -> Quota:
    """Return the quota of a run: online filtering fills a step, rejection fills whole mini batches."""
    prompts = data.rollout_batch_size
    return Quota(
        target=prompts,
        multiple=math.lcm(*mini_batch_prompts) if trainer.rejection_sample else prompts,
        oversampling=trainer.rejection_sample_multiplier if trainer.rejection_sample else 1,
        max_calls=max(trainer.max_try_make_batch, 0),
        prompts_per_call=data.mini_rollout_batch_size,
    )
