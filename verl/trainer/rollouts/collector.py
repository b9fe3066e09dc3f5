# SPDX-License-Identifier: Apache-2.0
"""Collects the sequences of a training step: samples prompts until the step is full.

Without a filter that is one rollout batch, still being scored. With a filter (`group_filter.py`) a step waits
for scores, leaves out uninformative groups, and carries surplus groups to the next step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.config.algorithm import AlgorithmConfig
from verl.config.worker import RewardConfig
from verl.protocol import DataProto
from verl.trainer.metrics import Metrics
from verl.trainer.rollouts.group_filter import WEIGHTS, EarlyStop, GroupFilter, Quota, Replay, StopCounts
from verl.trainer.rollouts.sampler import Sampler, with_uids
from verl.trainer.rollouts.scores import ScoredGroups, Scoring, column_of, shaping_terms
from verl.utils.rank_logger import get_logger
from verl.workers.rollout.interface import SamplingOptions

logger = get_logger(__name__)


class Collected(NamedTuple):
    """The sequences that a step trains on, and their scores."""

    batch: DataProto
    scoring: Scoring
    metrics: Metrics


@dataclass
class CollectedGroups:
    """Groups that a filtered step has gathered so far."""

    kept: list[ScoredGroups]
    sampled: list[Tensor] = field(default_factory=list)  # scores of all groups of each call, (G, n)
    stops: StopCounts = field(default_factory=StopCounts)
    replayed: range = range(0)  # places, among those kept, of groups to train on again

    @property
    def num_kept(self) -> int:
        return sum(len(groups) for groups in self.kept)

    @property
    def num_sampled(self) -> int:
        return sum(len(scores) for scores in self.sampled)


@dataclass(eq=False)
class RolloutCollector:
    """Collects the sequences of one training step from endless batches of prompts."""

    sampler: Sampler
    prompts: Iterator[DataProto]
    filter: GroupFilter | None  # None keeps every group
    quota: Quota
    algorithm: AlgorithmConfig
    reward: RewardConfig
    early_stop: EarlyStop | None = None
    weights_of: int = field(init=False, default=0)  # the step that begins with the weights that sample
    # Surplus groups, oldest first, with the `rollout_log_probs` of the weights that sampled them.
    carried: ScoredGroups | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.has_baselines = "reward_baselines" in self.algorithm.needs
        self.group_size = self.sampler.options.n
        max_age = self.algorithm.replay_max_age
        self.replay = None if max_age is None else Replay(max_age)

    def collect(self, step: int, weights_of: int | None = None) -> Collected:
        """Sample until the step has its prompts; consumes from the loader, waits for the workers.

        Adds `row_ids`, `rollout_steps` and, for `remax`, `reward_baselines` to the sequences.

        Args:
            weights_of: The step that begins with the weights that sample; None is `step`.
        """
        self.weights_of = step if weights_of is None else weights_of
        if self.filter is None:
            collected = self._collect_all(step)
        else:
            collected = self._collect_filtered(step, self.filter)
        batch, scoring, metrics = collected
        if self.has_baselines:
            metrics["reward/baseline"] = batch.batch["reward_baselines"].nanmean().item()
        return Collected(batch.merge({"row_ids": torch.arange(len(batch))}), scoring, metrics)

    @property
    def num_carried(self) -> int:
        return 0 if self.carried is None else len(self.carried)

    @property
    def num_replayable(self) -> int:
        return len(self.replay.groups) if self.replay and self.replay.groups is not None else 0

    def save_carried(self, path: Path) -> None:
        """Write the groups that wait for the next step, and the groups to replay in later ones."""
        stored = [self.carried, self.replay and self.replay.groups]
        groups = [part for part in stored if part is not None]
        if groups:
            ScoredGroups.concat(groups).save(path)

    def load_carried(self, path: Path, num_carried: int, step: int = 0) -> None:
        """Read what `save_carried` wrote after a step, the first `num_carried` groups of which wait."""
        groups = ScoredGroups.load(path)
        if self.filter is None:
            logger.warning("carried groups are dropped, this run filters nothing: groups=%d", len(groups))
            return
        self.check_fits(
            groups,
            "or set `algorithm.online_filtering=false` and `trainer.rejection_sample=false` to drop them",
        )
        carried, trained = groups.split(num_carried)
        self.carried = carried if num_carried else None
        if self.replay:
            self.replay.put(trained, step)  # the maximum age may be another one

    def _collect_all(self, step: int) -> Collected:
        parts: list[DataProto] = []
        scorings: list[Scoring] = []
        while sum(map(len, parts)) < self.quota.target * self.group_size:
            prompts = self._numbered(next(self.prompts), step, len(parts))
            sequences, scoring = self._sample(prompts)
            parts.append(sequences)
            scorings.append(scoring)
        return Collected(DataProto.concat(parts), Scoring.concat(scorings), {})

    def _collect_filtered(self, step: int, group_filter: GroupFilter) -> Collected:
        collected = CollectedGroups([] if self.carried is None else [self.carried])
        carried_in, quota = self.num_carried, self.quota
        wanted = quota.wanted(carried_in)
        while not quota.has_enough(collected.num_kept, collected.num_sampled, wanted):
            calls = len(collected.sampled)
            if quota.is_exhausted(calls):
                if collected.num_kept >= quota.multiple:
                    break
                raise self._shortage(collected, carried_in, group_filter)
            prompts = self._next_prompts(quota.wanted(collected.num_kept))
            groups, scores = self._sample_scored(self._numbered(prompts, step, calls), collected.stops)
            kept = group_filter.keep(scores[: len(groups)]).nonzero().flatten()  # (K,)
            collected.sampled.append(scores)
            if len(kept):
                collected.kept.append(groups.select(kept))
            if self.replay and not calls:
                replayed = self.replay.take(quota.target - collected.num_kept, self._filter_scores)
                if replayed is not None:
                    collected.replayed = range(collected.num_kept, collected.num_kept + len(replayed))
                    collected.kept.append(replayed)
        return self._divide(collected, carried_in, step)

    def _divide(self, collected: CollectedGroups, carried_in: int, step: int) -> Collected:
        """Train on the oldest groups and carry the others, except replayed ones: their age is limited."""
        kept, usable = ScoredGroups.concat(collected.kept), self.quota.usable(collected.num_kept)
        unused = collected.replayed[max(0, usable - collected.replayed.start) :]
        others = [place for place in range(usable, len(kept)) if place not in unused]
        trained, rest = kept.split(usable)[0], kept.select(torch.tensor(others, dtype=torch.int64))
        rest.check_storable()  # before training: a checkpoint must be able to hold them
        self.carried = rest if len(rest) else None
        if self.replay:
            trained.check_storable()
            self.replay.put(kept.select(torch.tensor([*unused, *range(usable)])), step)
        metrics = {
            "filter/tries": float(len(collected.sampled)),
            "filter/sampled": float(collected.num_sampled),
            "filter/kept": float(collected.num_kept - carried_in - len(collected.replayed)),
            "filter/carried_in": float(carried_in),
            "filter/carried_out": float(self.num_carried),
            "filter/trained": float(len(trained)),
        }
        metrics |= self.filter_metrics(collected.sampled, trained)
        if self.replay:
            metrics["filter/replayed"] = float(len(collected.replayed) - len(unused))
        if self.early_stop is not None:
            metrics |= collected.stops.metrics(trained)
        return Collected(trained.sequences, Scoring(lambda: trained.values), metrics)

    def _next_prompts(self, wanted: int) -> DataProto:
        limit = self.quota.prompts_per_call
        parts = [next(self.prompts)]
        while sum(map(len, parts)) < (wanted if limit is None else min(wanted, limit)):
            parts.append(next(self.prompts))
        return DataProto.concat(parts)

    def _numbered(self, prompts: DataProto, step: int, call: int) -> DataProto:
        prompts = with_uids(prompts, f"step{step}-{call}")
        return prompts.merge({"rollout_steps": torch.full((len(prompts),), self.weights_of)})

    def _sample(self, prompts: DataProto) -> tuple[DataProto, Scoring]:
        """Sample a group for each prompt, and before it the greedy response of `remax`."""
        if not self.has_baselines:
            return self.sampler.sample(prompts, self.sampler.options)
        baselines = self._sample_greedily(prompts)
        sequences, scoring = self.sampler.sample(prompts, self.sampler.options)
        column = baselines().repeat_interleave(self.group_size)
        return sequences.merge({"reward_baselines": column}), scoring

    def _sample_greedily(self, prompts: DataProto) -> Callable[[], Tensor]:
        """Sample a response to each prompt; return a function that waits for their scores, (G,)."""
        greedy, scoring = self.sampler.sample(prompts, self.sampler.greedy_options)
        penalty = shaping_terms(greedy.batch["response_mask"], self.reward).get("overlong_penalty", 0.0)
        return lambda: torch.tensor(scoring.result()["overall"]) + penalty

    def _sample_scored(self, prompts: DataProto, counts: StopCounts) -> tuple[ScoredGroups, Tensor]:
        """Sample groups and wait for their scores.

        Returns:
            The groups that were sampled to the end, and the scores of all prompts, (G, n), theirs first. A
            response that was not sampled has nan.
        """
        if self.early_stop is None:
            sequences, scoring = self._sample(prompts)
            groups = ScoredGroups(sequences, scoring.result(), self.group_size)
            return groups, self._filter_scores(groups)
        first, rest = self.early_stop.parts(self.sampler.options)
        groups = self._scored(prompts, first)
        scores = self._filter_scores(groups)  # (G, after)
        decision = self.early_stop.decide(scores, prompts.non_tensor_batch["uid"])
        counts.add(decision, first.n, rest.n)
        stopped = pad(scores[decision.is_stopped], (0, rest.n), value=math.nan)  # (S, n)
        going = (~decision.is_stopped).nonzero().flatten()  # (K,)
        if not len(going):
            return groups.select(going), stopped
        groups = self._sample_on(groups.select(going), prompts[going], rest, decision.weights[going])
        return groups, torch.cat([self._filter_scores(groups), stopped])

    def _sample_on(
        self, groups: ScoredGroups, prompts: DataProto, options: SamplingOptions, weights: Tensor
    ) -> ScoredGroups:
        groups = groups.extend(self._scored(prompts, options))
        columns = {WEIGHTS: weights}
        if self.has_baselines:
            columns["reward_baselines"] = self._sample_greedily(prompts)()
        repeated = {key: column.repeat_interleave(self.group_size) for key, column in columns.items()}
        return replace(groups, sequences=groups.sequences.merge(repeated))

    def _scored(self, prompts: DataProto, options: SamplingOptions) -> ScoredGroups:
        sequences, scoring = self.sampler.sample(prompts, options)
        return ScoredGroups(sequences, scoring.result(), options.n)

    def judge(self, group: ScoredGroups) -> tuple[Tensor, bool]:
        """Return the scores of one group that the filter reads, (1, n), and whether it keeps the group."""
        if self.filter is None:
            return torch.tensor([group.values["overall"]], dtype=torch.float64), True
        scores = self._filter_scores(group)
        return scores, bool(self.filter.keep(scores).item())

    def filter_metrics(self, sampled: Sequence[Tensor], trained: ScoredGroups) -> Metrics:
        """Return the filter's own metrics of groups with scores (G, n), and of the ones to train on."""
        assert self.filter is not None, "there is a filter"
        return self.filter.metrics(self._joined(sampled), self._filter_scores(trained))

    def check_shortage(self, sampled: Sequence[Tensor], num_finished: int) -> None:
        """Raise an error if a filter left out so much that a step cannot be filled in its number of tries.

        Args:
            sampled: Scores (1, n) of the groups that were sampled for the step.
            num_finished: Groups that wait for a step.
        """
        allowed = self.quota.max_calls * self.quota.target
        if self.filter is not None and num_finished < self.quota.target and 0 < allowed <= len(sampled):
            raise RuntimeError(
                f"a step needs {self.quota.target} groups, got {num_finished} of {len(sampled)} that were"
                f" sampled (`trainer.max_try_make_batch` x `data.rollout_batch_size`),"
                f" {self.filter.reasons(self._joined(sampled))}, or allow more tries"
            )

    def _filter_scores(self, groups: ScoredGroups) -> Tensor:
        """The scores that the filter reads, (G, group_size) float64."""
        column = column_of(groups.values, self.algorithm.filter_key, "algorithm.filter_key")
        return column.view(-1, groups.group_size)

    def _joined(self, scores: Sequence[Tensor]) -> Tensor:
        empty = torch.zeros(0, self.group_size, dtype=torch.float64)
        return torch.cat([empty, *scores])

    def _shortage(
        self, collected: CollectedGroups, carried_in: int, group_filter: GroupFilter
    ) -> RuntimeError:
        earlier = carried_in + len(collected.replayed)
        return RuntimeError(
            f"a step needs {self.quota.multiple} groups, got {collected.num_kept} in {self.quota.max_calls}"
            f" calls of the engine (`trainer.max_try_make_batch`): {collected.num_sampled} were sampled and"
            f" {collected.num_kept - earlier} kept, {earlier} came from earlier steps,"
            f" {group_filter.reasons(self._joined(collected.sampled))}, or allow more calls"
        )

    def check_fits(self, groups: ScoredGroups, remedy: str) -> None:
        """Raise a ValueError if groups of a checkpoint were sampled with options that differ."""
        tensors, sampler = groups.sequences.batch, self.sampler
        found = {
            "worker.rollout.n": (groups.group_size, self.group_size),
            "data.max_prompt_length": (tensors["prompts"].shape[-1], sampler.prompt_length),
            "data.max_response_length": (tensors["responses"].shape[-1], sampler.response_length),
            "worker.rollout.speculative": ("drafted_tokens" in tensors, sampler.counts_drafts),
            "algorithm.adv_estimator=remax": ("reward_baselines" in tensors, self.has_baselines),
            "algorithm.early_stop.after": (WEIGHTS in tensors, self.early_stop is not None),
        }
        changed = {option: pair for option, pair in found.items() if pair[0] != pair[1]}
        if changed:
            raise ValueError(
                f"the checkpoint carries {len(groups)} groups sampled with other options, (then, now):"
                f" {changed}: resume with the same options, {remedy}"
            )
