# SPDX-License-Identifier: Apache-2.0
"""Select the prompts that a step trains on, by the scores of their responses.

A filter sees the scores of whole groups, (G, n), under `algorithm.filter_key`; nan is a response without a
score, which is ignored. To add one: a class with the same methods in `GroupFilter` and `make_group_filter`.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.config.algorithm import AlgorithmConfig, EarlyStopConfig
from verl.config.data import DataConfig
from verl.config.ppo import TrainerConfig
from verl.rewards.manager import NoRewardFunction, RewardManager
from verl.trainer.metrics import Metrics
from verl.trainer.rollouts.scores import ScoredGroups
from verl.workers.rollout.interface import SamplingOptions


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


@dataclass
class Replay:
    """Groups that were trained on, to fill later steps for which a filter keeps too few.

    Each keeps the `rollout_log_probs` of the weights that sampled it, which `rollout_correction` compares.
    """

    max_age: int  # steps
    groups: ScoredGroups | None = None  # in the order of their training

    def take(self, count: int, scores: Callable[[ScoredGroups], Tensor]) -> ScoredGroups | None:
        """Return at most `count` groups, those whose scores (G, n) vary most, the newest of equal ones."""
        if self.groups is None or count <= 0:
            return None
        values = scores(self.groups)
        variances = (values - values.nanmean(-1, keepdim=True)).square().nanmean(-1)  # (G,)
        order = len(variances) - 1 - variances.flip(0).argsort(descending=True, stable=True)
        taken, rest = order[:count].sort().values, order[count:].sort().values
        found = self.groups.select(taken)
        self.groups = self.groups.select(rest) if len(rest) else None
        return found

    def put(self, trained: ScoredGroups, step: int) -> None:
        """Add the groups of a step, and drop what is too old for the next one."""
        groups = trained if self.groups is None else ScoredGroups.concat([self.groups, trained])
        ages = step + 1 - groups.sequences.batch["rollout_steps"][:: groups.group_size]  # (G,)
        young = (ages <= self.max_age).nonzero().flatten()
        self.groups = groups.select(young) if len(young) else None


WEIGHTS = "sequence_weights"  # column of the batch


class Decision(NamedTuple):
    """Groups to stop, and the weights of the others."""

    is_stopped: Tensor  # (G,) bool
    weights: Tensor  # (G,) float32, at least 1, if they are sampled on


@dataclass(frozen=True)
class EarlyStop:
    """Samples prompts in two parts, so that a filter can stop prompts it would drop.

    The filter looks at the scores of the first responses. A prompt that it would keep is sampled on; another
    one only with a probability q, and then its responses weigh 1 / q in the loss. What a prompt is worth in
    expectation is therefore what it would be without the stop, and the loss, a weighted mean, estimates the
    same.

    Source: Russian roulette, as Monte Carlo simulations end paths of little worth (Kahn and Harris,
    "Estimation of Particle Transmission by Random Sampling", 1951).
    """

    after: int  # responses
    keep_probability: float
    filter: GroupFilter
    seed: int  # from which, with the `uid` of a group, the decision on it follows

    def parts(self, options: SamplingOptions) -> tuple[SamplingOptions, SamplingOptions]:
        """Divide the responses to a prompt into the first ones and the rest."""
        first = replace(options, n=self.after)
        return first, replace(options, n=options.n - self.after, first_sample=self.after)

    def decide(self, scores: Tensor, uids: Iterable[Any]) -> Decision:
        """Choose the groups to stop, by the scores of their first responses, (G, after)."""
        is_promising = self.filter.keep(scores)  # (G,)
        is_spared = torch.tensor([self._draw(uid) < self.keep_probability for uid in uids])  # (G,)
        weights = torch.where(is_promising, 1.0, 1.0 / self.keep_probability)
        return Decision(~is_promising & ~is_spared, weights.float())

    def _draw(self, uid: Any) -> float:
        digest = hashlib.blake2b(f"{self.seed} {uid}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


@dataclass
class StopCounts:
    """Counts of a step's stopped groups and responses."""

    num_stopped: int = 0  # groups
    num_spared: int = 0  # groups that were sampled on by chance
    num_saved: int = 0  # responses that were not sampled
    num_planned: int = 0  # responses that there would have been

    def add(self, decision: Decision, first: int, rest: int) -> None:
        """Count the groups of a call, of `first` and `rest` responses."""
        is_stopped, weights = decision
        num_stopped = int(is_stopped.sum())
        self.num_stopped += num_stopped
        self.num_spared += int((~is_stopped & (weights > 1)).sum())
        self.num_saved += num_stopped * rest
        self.num_planned += len(weights) * (first + rest)

    def metrics(self, trained: ScoredGroups) -> Metrics:
        """Count what was stopped, and compare the groups that are trained on with what they cost.

        `effective_groups` is the number of groups of equal weight with the same variance (Kish). `gain` is
        these for each sampled response, relative to sampling without a stop: below 1 the weights add more
        variance than the stop saves.
        """
        weights = trained.sequences.batch[WEIGHTS][:: trained.group_size].double()  # (G,)
        total, squares = weights.sum().item(), weights.square().sum().item()
        saved = self.num_saved / max(self.num_planned, 1)
        return {
            "early_stop/stopped": float(self.num_stopped),
            "early_stop/spared": float(self.num_spared),
            "early_stop/saved_responses": saved,
            "early_stop/effective_groups": total**2 / squares,
            "early_stop/gain": total / squares / (1 - saved),
        }


def make_early_stop(
    algorithm: AlgorithmConfig, group_filter: GroupFilter | None, seed: int
) -> EarlyStop | None:
    """Return the stop of a run; None samples all responses at once."""
    options = algorithm.early_stop
    if options.after is None:
        return None
    assert group_filter is not None, "rules of the config ask for one"
    return EarlyStop(options.after, options.keep_probability, group_filter, seed)


def check_scored_alone(
    options: EarlyStopConfig, reward: RewardManager | NoRewardFunction, batch_size: int
) -> None:
    """Raise a ValueError if the reward function may compare the responses to a prompt."""
    compares = reward.reward_type != "sequential" and batch_size < 1
    if options.is_used and compares and not isinstance(reward, NoRewardFunction):
        raise ValueError(
            f"`algorithm.early_stop.after` ({options.after}) needs a reward function that scores responses"
            f" one by one, and {reward.name} is of type {reward.reward_type!r}, which sees all responses to a"
            ' prompt at once: write `REWARD_TYPE = "sequential"` into its file, or set'
            " `worker.reward.batch_size` to the responses of a call if it compares nothing"
        )
