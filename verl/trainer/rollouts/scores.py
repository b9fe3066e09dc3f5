# SPDX-License-Identifier: Apache-2.0
"""Scores of responses: from the reward function's values to scores on tokens, and groups of scored sequences.

`Scoring` waits for the reward function; `score` adds the overlong penalty and the reward model's score and
puts the sum on each response's last token, rewards of turns on their turns' last tokens. To add a term: one
more entry in `shaping_terms`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.resampling import overlong_penalty
from verl.config.algorithm import AlgorithmConfig
from verl.config.worker import RewardConfig, WorkerConfig
from verl.protocol import DataProto, objects
from verl.rewards import turns
from verl.rewards.manager import FAILURES, RETRIES
from verl.trainer.metrics import Metrics, compute_reward_metrics
from verl.utils.plain_data import encode

COLUMN_PREFIX = "score/"  # names the columns that hold the reward function's values in a file

Values = dict[str, list[float]]  # of the reward function, by name; one number for each sequence


@dataclass(frozen=True)
class Scoring:
    """The scores of a batch while they are computed; `result` waits for them."""

    result: Callable[[], Values]

    def shown_to(self, observer: Callable[[Values], None]) -> "Scoring":
        """Return scores that an observer sees once, when they are known."""

        @cache
        def result() -> Values:
            values = self.result()
            observer(values)
            return values

        return Scoring(result)

    def reorder(self, order: Sequence[int]) -> "Scoring":
        return Scoring(lambda: rows_of(self.result(), order))

    @staticmethod
    def concat(parts: Sequence["Scoring"]) -> "Scoring":
        return Scoring(lambda: join_values([part.result() for part in parts]))


def rows_of(values: Values, rows: Sequence[int]) -> Values:
    return {key: [column[row] for row in rows] for key, column in values.items()}


def join_values(parts: Sequence[Values]) -> Values:
    keys = dict.fromkeys(key for part in parts for key in part)
    joined: Values = {key: [] for key in keys}
    for part in parts:
        for key in keys:
            # A batch without these two columns had no failures and no retries.
            absent = 0.0 if key in (FAILURES, RETRIES) else math.nan
            joined[key].extend(part.get(key) or [absent] * len(part["overall"]))
    return joined


def unscored(result: Callable[[], Values], rows: Sequence[int]) -> Values:
    """Return the values with nan in some rows: conversations that do not count."""
    values = {name: list(column) for name, column in result().items()}
    for name in values.keys() - {FAILURES, RETRIES}:
        for row in rows:
            values[name][row] = math.nan
    return values


def score(
    batch: DataProto, values: Values, worker: WorkerConfig, algorithm: AlgorithmConfig
) -> tuple[DataProto, Metrics]:
    """Put each response's score on its last token, see `on_tokens`.

        score_i = overall_i + overlong penalty_i + coef * model_score_i

    Rewards of turns, of which `overall` is the sum, are on the last token of each turn instead.

    A response without a score, because a call of the reward function failed or `on_tool_error` masked its
    conversation, loses its `loss_mask`: from here on it takes no part.

    Returns:
        The batch with `token_level_scores` (B, R), `reward_values` (B,) and, for estimators that read single
        values, `reward_components` (B, K); and the mean of each value and term as `reward/<name>`.
    """
    tensors, model_scores = batch.batch, batch.batch.get("reward_model_scores")
    total, terms = add_terms(values, tensors["response_mask"], model_scores, worker)
    overall = torch.tensor(values["overall"])  # (B,)
    replaced, is_masked = _mask_unscored(batch, overall)
    added = {"token_level_scores": on_tokens(batch.merge(replaced, replace=replaced), total, values)}
    option, keys = component_keys(algorithm)
    if keys:
        columns = [column_of(values, key, option) for key in keys]
        components = torch.stack(columns, dim=-1).float()  # (B, K)
        added["reward_components"] = components.masked_fill(is_masked.unsqueeze(-1), 0.0)
    scored = batch.merge(added | {"reward_values": reward_values(values)})
    return scored.merge(replaced, replace=replaced), _score_metrics(values, terms)


def add_terms(
    values: Values, mask: Tensor, model_scores: Tensor | None, worker: WorkerConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scores, (B,) float64, and what they have in addition to `overall`: terms (B,) by name."""
    terms = shaping_terms(mask, worker.reward)
    if model_scores is not None:
        terms["reward_model"] = model_scores.float()
    _check_names(values, terms)
    overall = torch.tensor(values["overall"], dtype=torch.float64)
    total = overall + terms.get("overlong_penalty", 0.0)  # (B,)
    if model_scores is not None:
        total = total + worker.reward_model.coef * terms["reward_model"]
    return total, terms


def _score_metrics(values: Values, terms: Mapping[str, Tensor]) -> Metrics:
    # Shares of responses whose call failed or was repeated, also if there were none.
    calls = {name: [0.0] * len(values["overall"]) for name in (FAILURES, RETRIES)}
    logged = calls | values | {name: term.tolist() for name, term in terms.items()}
    return compute_reward_metrics(logged)


def _mask_unscored(batch: DataProto, overall: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that change if responses lack a score, and which responses do, (B,) bool."""
    baselines = batch.batch.get("reward_baselines")  # (B,) of remax, or None
    is_masked = overall.isnan() if baselines is None else overall.isnan() | baselines.isnan()  # (B,)
    if not is_masked.any():
        return {}, is_masked
    tensors = {"loss_mask": batch.batch["loss_mask"].masked_fill(is_masked.unsqueeze(-1), 0)}
    if baselines is not None:
        tensors["reward_baselines"] = baselines.masked_fill(is_masked, 0.0)
    return tensors, is_masked


def shaping_terms(mask: Tensor, reward: RewardConfig) -> dict[str, Tensor]:
    """Terms that a response's length adds to its score, each (B,), for response masks (B, R)."""
    if reward.overlong_buffer_length == 0:
        return {}
    lengths, longest = mask.sum(-1), mask.shape[-1]  # R is `data.max_response_length`
    penalty = overlong_penalty(
        lengths, longest, reward.overlong_buffer_length, reward.overlong_penalty_factor
    )
    is_overlong = lengths > longest - reward.overlong_buffer_length
    return {"overlong": is_overlong.float(), "overlong_penalty": penalty}


def on_tokens(sequences: DataProto, scores: Tensor, values: Values) -> Tensor:
    """Put scores (B,) on the last token of each response, and the rewards of turns in them on each turn's.

    Only tokens that count in `loss_mask` have scores: a turn without any gives its reward to the last one
    before it, or else to the first one after it. Returns (B, R) float32.
    """
    mask = sequences.batch["loss_mask"]
    names = sorted(filter(turns.is_reward_of_turn, values), key=lambda name: (len(name), name))
    if not names or "turns" not in sequences.non_tensor_batch:
        return on_last_tokens(scores, mask)
    rewards = torch.tensor([values[name] for name in names], dtype=torch.float64).T  # (B, K), nan without
    has_rewards = ~rewards.isnan().all(-1)  # (B,)
    overall = torch.tensor(values["overall"], dtype=torch.float64)
    rest = torch.where(has_rewards, scores - overall, scores)  # (B,)
    stops = torch.ones(rewards.shape, dtype=torch.int64)  # (B, K)
    for row, conversation in enumerate(sequences.non_tensor_batch["turns"]):
        stops[row, : len(conversation)] = torch.tensor([turn["stop"] for turn in conversation[: len(names)]])
    return on_last_tokens(rest, mask) + _before(stops, rewards.nan_to_num(0.0), mask)


def _before(stops: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """Put rewards (B, K) on the last token of the mask (B, R) before each stop, (B, K)."""
    positions = torch.arange(mask.shape[-1]) + 1  # (R,)
    last = (mask * positions).cummax(-1).values  # (B, R), one more than the last position so far; 0 without
    found = last.gather(-1, stops - 1) - 1  # (B, K)
    first = mask.argmax(-1, keepdim=True)  # (B, 1)
    kept = torch.where(mask.any(-1, keepdim=True), rewards.float(), 0.0)
    return torch.zeros(mask.shape).scatter_add(1, torch.where(found < 0, first, found), kept)


def on_last_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    """Put scores (B,) on the last token of each row of the mask (B, R); rows without a token stay zero."""
    ends = torch.full((len(mask), 1), mask.shape[-1])  # (B, 1)
    return _before(ends, scores.unsqueeze(-1), mask)


def component_keys(algorithm: AlgorithmConfig) -> tuple[str, list[str]]:
    """The values that the advantage estimator reads one by one, after the option that names them."""
    if "reward_components" in algorithm.needs:
        return "algorithm.gdpo_reward_keys", list(algorithm.gdpo_reward_keys)
    keys = [algorithm.prime_accuracy_key] if algorithm.use_prime else []
    return "algorithm.prime_accuracy_key", keys


def column_of(values: Values, key: str, option: str) -> Tensor:
    """One value of the reward function, (B,) float64; a response whose call failed has its `overall`."""
    failed = torch.tensor(values.get(FAILURES, [0.0] * len(values["overall"]))) > 0  # (B,)
    if key not in values and not failed.all():
        raise ValueError(
            f"`{option}` must name values that the reward function returns, got {key!r}: it returns"
            f" {sorted(set(values) - {FAILURES, RETRIES})}"
        )
    overall = torch.tensor(values["overall"], dtype=torch.float64)
    column = torch.tensor(values.get(key, values["overall"]), dtype=torch.float64)
    column = torch.where(failed, overall, column)
    missing = int((column.isnan() & ~failed).sum())
    if missing:
        raise ValueError(
            f"`{option}` names {key!r}, which the reward function must return for every response: it is"
            f" missing for {missing} of {len(column)}"
        )
    return column


def reward_values(values: Values) -> np.ndarray:
    """The values of each row as one object: {"overall": 1.0, "format": 0.0}.

    A conversation has the rewards of its own turns, however many others have.
    """
    rows = zip(*values.values(), strict=True)
    named = [zip(values, row, strict=True) for row in rows]
    return objects([
        {name: value for name, value in row if not (turns.is_reward_of_turn(name) and math.isnan(value))}
        for row in named
    ])  # fmt: skip


def _check_names(values: Values, terms: Mapping[str, Tensor]) -> None:
    both = sorted(set(values) & set(terms))
    if both:
        raise ValueError(
            f"the reward function returns {both}, which the trainer adds as well: rename them in the"
            " function, or set `worker.reward.overlong_buffer_length=0` if it has a penalty of its own"
        )


@dataclass(frozen=True)
class ScoredGroups:
    """G groups of n sequences with their scores; the responses to a prompt are adjacent."""

    sequences: DataProto  # G * n rows
    values: Values  # of the reward function, one number for each row
    group_size: int  # n

    def __len__(self) -> int:
        return len(self.sequences) // self.group_size

    def select(self, groups: Tensor) -> "ScoredGroups":
        """Copy the groups with these numbers, (K,) int64."""
        rows = (groups.unsqueeze(-1) * self.group_size + torch.arange(self.group_size)).flatten()
        return ScoredGroups(self.sequences[rows], rows_of(self.values, rows.tolist()), self.group_size)

    @staticmethod
    def concat(parts: Sequence["ScoredGroups"]) -> "ScoredGroups":
        sequences = DataProto.concat([part.sequences for part in parts])
        return ScoredGroups(sequences, join_values([part.values for part in parts]), parts[0].group_size)

    def extend(self, others: "ScoredGroups") -> "ScoredGroups":
        """Join groups of the same prompts: each gets the sequences of the other after its own."""
        sizes = self.group_size, others.group_size
        ends = len(self.sequences), len(self.sequences) + len(others.sequences)
        own, new = torch.arange(ends[0]), torch.arange(*ends)
        order = torch.cat([own.view(-1, sizes[0]), new.view(-1, sizes[1])], dim=-1)  # (G, n)
        sequences = DataProto.concat([self.sequences, others.sequences])
        joined = ScoredGroups(sequences, join_values([self.values, others.values]), 1)
        return replace(joined.select(order.flatten()), group_size=sum(sizes))

    def split(self, first: int) -> tuple["ScoredGroups", "ScoredGroups"]:
        """Split off the `first` groups, which share memory with these; the others are copied."""
        end = first * self.group_size
        values = {key: column[:end] for key, column in self.values.items()}
        head = ScoredGroups(self.sequences[:end], values, self.group_size)
        return head, self.select(torch.arange(first, len(self)))

    def check_storable(self) -> None:
        """Raise a `TypeError` that names the column if `save` would fail."""
        for key, column in self.sequences.non_tensor_batch.items():
            encode(column, f"column `{key}` of the training rows")

    def save(self, path: Path, **entries: Any) -> None:
        """Write the groups, with further entries of their `meta_info`."""
        scores = {
            COLUMN_PREFIX + key: torch.tensor(column, dtype=torch.float64)
            for key, column in self.values.items()
        }
        about = {"group_size": self.group_size, "keys": list(self.values), **entries}
        self.sequences.merge(DataProto.from_dict(scores, meta_info=about)).save_to_disk(path)

    @staticmethod
    def load(path: Path) -> "ScoredGroups":
        stored = DataProto.load_from_disk(path)
        group_size, keys = stored.meta_info.pop("group_size"), stored.meta_info.pop("keys")
        scores = stored.pop([COLUMN_PREFIX + key for key in keys]).batch
        return ScoredGroups(stored, {key: scores[COLUMN_PREFIX + key].tolist() for key in keys}, group_size)
