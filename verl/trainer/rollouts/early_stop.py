# SPDX-License-Identifier: Apache-2.0
"""Sample prompts in two parts, so that a filter can stop prompts it would drop.

The filter looks at the scores of the first responses. A prompt that it would keep is sampled on; another one
only with a probability q, and then its responses weigh 1 / q in the loss. What a prompt is worth in
expectation is therefore what it would be without the stop, and the loss, a weighted mean, estimates the same.

Source: Russian roulette, as Monte Carlo simulations end paths of little worth (Kahn and Harris, "Estimation
of Particle Transmission by Random Sampling", 1951).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.config.algorithm import AlgorithmConfig, EarlyStopConfig
from verl.rewards.manager import NoRewardFunction, RewardManager
from verl.trainer.metrics import Metrics
from verl.trainer.rollouts.group_filter import GroupFilter
from verl.trainer.rollouts.scores import ScoredGroups
from verl.workers.rollout.interface import SamplingOptions

WEIGHTS = "sequence_weights"  # column of the batch


class Decision(NamedTuple):
    """Groups to stop, and the weights of the others."""

    is_stopped: Tensor  # (G,) bool
    weights: Tensor  # (G,) float32, at least 1, if they are sampled on


@dataclass(frozen=True)
class EarlyStop:
    """Decides which groups are sampled on after their first responses.

    Args:
        seed: Number from which, with the `uid` of a group, the decision on it follows.
    """

    after: int  # responses
    keep_probability: float
    filter: GroupFilter
    seed: int

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
