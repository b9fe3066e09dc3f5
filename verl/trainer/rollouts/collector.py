# SPDX-License-Identifier: Apache-2.0
"""Collects the sequences of a training step: samples prompts until it has those it trains on.

Without a filter that is one rollout batch, still being scored. With a filter (`group_filter.py`) scores are
waited for, uninformative groups are left out, and what a step does not need is carried to the next one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.trainer.metrics import Metrics
from verl.trainer.rollouts.group_filter import GroupFilter, make_group_filter, make_quota
from verl.trainer.rollouts.sampler import Sampler, greedy_options, sampling_options, with_uids
from verl.trainer.rollouts.scored_groups import ScoredGroups
from verl.trainer.rollouts.scores import KnownScores, Scoring, column_of, shaping_terms
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


class Collected(NamedTuple):
    """What a step trains on: the sequences, their scores, and how they were found."""

    batch: DataProto
    scoring: Scoring
    metrics: Metrics


@dataclass
class CollectedGroups:
    """What a filtered step has gathered so far."""

    kept: list[ScoredGroups]
    sampled: list[Tensor] = field(default_factory=list)  # scores of all groups of each call, (G, n)

    @property
    def num_kept(self) -> int:
        """Groups to train on."""
        return sum(len(groups) for groups in self.kept)

    @property
    def num_sampled(self) -> int:
        """Groups that were sampled, kept or not."""
        return sum(len(scores) for scores in self.sampled)


class RolloutCollector:
    """Collects the sequences of one training step.

    Attributes:
        carried: Groups that were kept but not needed, oldest first; the next step begins with them. They keep
            the `rollout_log_probs` of the weights that sampled them.
    """

    def __init__(self, config: PPOConfig, sampler: Sampler, prompts: Iterator[DataProto]) -> None:
        """Collect with `sampler` from endless batches of prompts."""
        self.config = config
        self.sampler = sampler
        self.prompts = prompts
        self.filter = make_group_filter(config)
        self.quota = make_quota(config)
        self.options = sampling_options(config)
        self.greedy = greedy_options(config) if config.algorithm.adv_estimator == "remax" else None
        self.carried: ScoredGroups | None = None

    def collect(self, step: int) -> Collected:
        """Sample until the step has its prompts; consumes from the loader, waits for the workers.

        Args:
            step: Its number; makes the prompts' `uid` unique.

        Returns:
            A batch with `row_ids`, `rollout_steps` and, for `remax`, `reward_baselines`.

        Raises:
            ValueError: The reward function does not return `algorithm.filter_key`.
            RuntimeError: `trainer.max_try_make_batch` calls of the engine did not give enough groups.
        """
        if self.filter is None:
            collected = self._collect_all(step)
        else:
            collected = self._collect_filtered(step, self.filter)
        batch, scoring, metrics = collected
        if self.greedy is not None:
            metrics["reward/baseline"] = batch.batch["reward_baselines"].nanmean().item()
        row_ids = DataProto.from_dict({"row_ids": torch.arange(len(batch))})
        return Collected(batch.merge(row_ids), scoring, metrics)

    @property
    def num_carried(self) -> int:
        """Groups that wait for the next step."""
        return 0 if self.carried is None else len(self.carried)

    def save_carried(self, path: Path) -> None:
        """Write the carried groups to a file; no file without any."""
        if self.carried is not None:
            self.carried.save(path)

    def load_carried(self, path: Path) -> None:
        """Go on with the carried groups of a file.

        Raises:
            ValueError: They do not fit the options of this run.
        """
        groups = ScoredGroups.load(path)
        if self.filter is None:
            logger.warning("carried groups are dropped, this run filters nothing: groups=%d", len(groups))
            return
        self._check_fits(groups)
        self.carried = groups

    def _collect_all(self, step: int) -> Collected:
        parts: list[DataProto] = []
        scorings: list[Scoring] = []
        collected = 0
        while collected < self.quota.target:
            sequences, scoring = self._sample(next(self.prompts), step, len(parts))
            parts.append(sequences)
            scorings.append(scoring)
            collected += len(sequences) // self.options.n
        return Collected(DataProto.concat(parts), Scoring(scorings), {})

    def _collect_filtered(self, step: int, group_filter: GroupFilter) -> Collected:
        harvest = CollectedGroups([] if self.carried is None else [self.carried])
        carried_in, quota = self.num_carried, self.quota
        wanted = quota.wanted(carried_in)
        while not quota.has_enough(harvest.num_kept, harvest.num_sampled, wanted):
            calls = len(harvest.sampled)
            if quota.gives_up(calls):
                if harvest.num_kept >= quota.multiple:
                    break
                raise self._shortage(harvest, carried_in, group_filter)
            prompts = self._next_prompts(quota.wanted(harvest.num_kept))
            sequences, scoring = self._sample(prompts, step, calls)
            groups = ScoredGroups(sequences, scoring.result(), self.options.n)
            scores = self._filter_scores(groups)  # (G, n)
            kept = group_filter.keep(scores).nonzero().flatten()  # (K,)
            harvest.sampled.append(scores)
            harvest.kept.append(groups.select(kept))
        return self._divide(harvest, carried_in, group_filter)

    def _divide(self, harvest: CollectedGroups, carried_in: int, group_filter: GroupFilter) -> Collected:
        """Train on the oldest groups and carry the others."""
        trained, rest = ScoredGroups.concat(harvest.kept).split(self.quota.usable(harvest.num_kept))
        rest.check_storable()
        self.carried = rest if len(rest) else None
        metrics = {
            "filter/tries": float(len(harvest.sampled)),
            "filter/sampled": float(harvest.num_sampled),
            "filter/kept": float(harvest.num_kept - carried_in),
            "filter/carried_in": float(carried_in),
            "filter/carried_out": float(self.num_carried),
            "filter/trained": float(len(trained)),
        }
        metrics |= group_filter.metrics(self._sampled_scores(harvest), self._filter_scores(trained))
        return Collected(trained.sequences, Scoring([KnownScores(trained.values)]), metrics)

    def _next_prompts(self, wanted: int) -> DataProto:
        """Prompts for one call: batches of the loader until there are `wanted`, or the call is full."""
        limit = self.quota.prompts_per_call
        parts = [next(self.prompts)]
        while sum(map(len, parts)) < (wanted if limit is None else min(wanted, limit)):
            parts.append(next(self.prompts))
        return DataProto.concat(parts)

    def _sample(self, prompts: DataProto, step: int, call: int) -> tuple[DataProto, Scoring]:
        """Sample a group for each prompt, and before it the greedy response of `remax`."""
        prompts = with_uids(prompts, f"step{step}-{call}")
        prompts = prompts.merge(DataProto.from_dict({"rollout_steps": torch.full((len(prompts),), step)}))
        if self.greedy is None:
            return self.sampler.sample(prompts, self.options)
        greedy, greedy_scoring = self.sampler.sample(prompts, self.greedy)
        sequences, scoring = self.sampler.sample(prompts, self.options)
        baselines = torch.tensor(greedy_scoring.result()["overall"])  # (G,)
        lengths = greedy.batch["response_mask"].sum(-1)  # (G,)
        baselines = baselines + shaping_terms(lengths, self.config).get("overlong_penalty", 0.0)
        repeated = DataProto.from_dict({"reward_baselines": baselines.repeat_interleave(self.options.n)})
        return sequences.merge(repeated), scoring

    def _filter_scores(self, groups: ScoredGroups) -> Tensor:
        """The scores that the filter reads, (G, n) float64."""
        column = column_of(groups.values, self.config.algorithm.filter_key, "algorithm.filter_key")
        return column.view(-1, self.options.n)

    def _sampled_scores(self, harvest: CollectedGroups) -> Tensor:
        empty = torch.zeros(0, self.options.n, dtype=torch.float64)
        return torch.cat([empty, *harvest.sampled])

    def _shortage(self, harvest: CollectedGroups, carried_in: int, group_filter: GroupFilter) -> RuntimeError:
        """Say why a step cannot be filled."""
        kept = harvest.num_kept - carried_in
        return RuntimeError(
            f"a step needs {self.quota.multiple} groups, got {harvest.num_kept} in {self.quota.max_calls}"
            f" calls of the engine (`trainer.max_try_make_batch`): {harvest.num_sampled} were sampled and"
            f" {kept} kept, {carried_in} came from the step before,"
            f" {group_filter.reasons(self._sampled_scores(harvest))}, or allow more calls"
        )

    def _check_fits(self, groups: ScoredGroups) -> None:
        tensors, data = groups.sequences.batch, self.config.data
        found = {
            "worker.rollout.n": (groups.group_size, self.options.n),
            "data.max_prompt_length": (tensors["prompts"].shape[-1], data.max_prompt_length),
            "data.max_response_length": (tensors["responses"].shape[-1], data.max_response_length),
            "algorithm.adv_estimator=remax": ("reward_baselines" in tensors, self.greedy is not None),
        }
        changed = {option: pair for option, pair in found.items() if pair[0] != pair[1]}
        if changed:
            raise ValueError(
                f"the checkpoint carries {len(groups)} groups sampled with other options, (then, now):"
                f" {changed}: resume with the same options, or set `algorithm.online_filtering=false` and"
                " `trainer.rejection_sample=false` to drop them"
            )
