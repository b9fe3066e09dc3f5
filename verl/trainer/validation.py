# SPDX-License-Identifier: Apache-2.0
"""Scores the held-out prompts, also by category, and keeps a few responses to read.

Categories are the values of the columns that `data.category_keys` names: a validation logs the means of each,
and an evaluation reports them as a table.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.config.worker import WorkerConfig
from verl.logger.base import Generation
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import Metrics, compute_reward_metrics, known_mean, length_metrics
from verl.trainer.rollouts.sampler import Sampler, with_uids
from verl.trainer.rollouts.scores import Scoring, Values, add_terms, on_tokens, reward_values
from verl.utils.rank_logger import get_logger

NO_CATEGORY = "(none)"  # of rows whose column is empty
MAX_LOGGED = 100  # categories of a column; more would drown the other metrics
# MLflow refuses other characters, and `/` separates the parts of a name.
NOT_IN_NAMES = re.compile(r"[^\w.: -]")

logger = get_logger(__name__)


class Categories(NamedTuple):
    """The columns of categories and how a batch names them."""

    keys: Sequence[str]  # columns of the rows, of `data.category_keys`
    answer_key: str  # column of the answers, which a batch calls `ground_truth`

    def of(self, columns: Mapping[str, Any], number: int) -> dict[str, list[str]]:
        """Return the category of each of `number` rows by column; rows without one have `NO_CATEGORY`."""
        found = {key: self._name_in(columns, key) for key in self.keys}
        return {
            key: [NO_CATEGORY] * number if name is None else [as_category(value) for value in columns[name]]
            for key, name in found.items()
        }

    def _name_in(self, columns: Mapping[str, Any], key: str) -> str | None:
        # A column with the name of a batch key was renamed, and the answers are `ground_truth`.
        names = (f"{key}_column", "ground_truth" if key == self.answer_key else key)
        return next((name for name in names if name in columns), None)


def as_category(value: Any) -> str:
    """Return the category that a cell of a row names."""
    return NO_CATEGORY if value is None or value == "" else str(value)


def means_by_category(
    categories: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[float]], scores: Sequence[float]
) -> Metrics:
    """Compute the means of each category: `val/COLUMN/CATEGORY/{NAME}_reward` and `.../reward_score`.

    Responses that could not be scored (nan) are left out. Columns with more than `MAX_LOGGED` categories have
    no metrics, which a warning says.
    """
    metrics: Metrics = {}
    for key, names in categories.items():
        parts: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            parts.setdefault(NOT_IN_NAMES.sub("_", name.strip("()")), []).append(row)
        if len(parts) > MAX_LOGGED:
            logger.warning(
                "a column has too many categories for metrics: column=%s categories=%d limit=%d", key,
                len(parts), MAX_LOGGED,
            )  # fmt: skip
            continue
        for name, rows in sorted(parts.items()):
            part = {value: [column[row] for row in rows] for value, column in values.items()}
            prefix = f"val/{NOT_IN_NAMES.sub('_', key)}/{name}/"
            metrics |= score_means(prefix, part, [scores[row] for row in rows])
    return metrics


def score_means(prefix: str, values: dict[str, list[float]], scores: Iterable[float]) -> Metrics:
    """Compute the mean of each value as `{NAME}_reward`, and that of the scores, if any is known."""
    metrics = {f"{key}_reward": mean for key, mean in compute_reward_metrics(values, prefix).items()}
    score = known_mean(scores)
    return metrics if score is None else metrics | {f"{prefix}reward_score": score}


SHOWN, SHOWN_COLUMNS = ["responses", "response_mask", "prompt_mask"], ["prompt_text", "ground_truth"]
NO_SCORE = (
    "no response has a score: the reward function, or a tool, the environment or the agent, failed in each of"
    " them"
)
NO_CATEGORIES = Categories((), "answer")
SAMPLES_SEED = 42  # the same prompts are shown after every validation


class ScoredResponses(NamedTuple):
    """The responses of a validation and their scores."""

    sequences: DataProto
    values: Values  # of the reward function
    terms: dict[str, Tensor]  # (B,) what scores have in addition to `overall`
    scores: list[float]  # that training would use; nan where scoring failed
    categories: dict[str, list[str]]  # of each response, by column


@dataclass(eq=False)
class Validator:
    """Samples and scores every held-out prompt."""

    sampler: Sampler
    workers: RayWorkerGroup  # score with the reward model
    loader: Iterable[DataProto] | None
    worker: WorkerConfig
    dp_size: int
    num_samples: int  # responses to show: `trainer.val_generations_to_log`
    num_recorded: int = 0  # first prompts whose responses are recorded: `trainer.rollouts_to_keep`
    categories: Categories = NO_CATEGORIES  # columns whose values have means of their own

    # Of the last validation: the responses to show, always to the same prompts, ...
    samples: list[Generation] = field(init=False, default_factory=list)
    # ... and those to the first prompts with their scores, for `RolloutLog`; None without any.
    recorded: DataProto | None = field(init=False, default=None)
    _sampled: list[tuple[DataProto, Scoring]] = field(init=False, default_factory=list)

    def sample(self, step: int) -> None:
        """Sample a response to every prompt; the engine must be awake."""
        self._sampled = [
            self.sampler.sample(with_uids(prompts, f"val{step}-{number}"), self.sampler.validation_options)
            for number, prompts in enumerate(self.loader or ())
        ]

    def measure(self) -> Metrics:
        """Wait for the scores and return their means, without the responses whose scoring failed.

        `val/reward_score` is the mean of the scores that training would use: `overall` plus the overlong
        penalty and the reward model's weighted score, if there are any.
        """
        first = self._first_sequences()
        scored = self.score(SHOWN, [*SHOWN_COLUMNS, *self.sampler.shown_columns])
        self.recorded = None if first is None else as_finished(first, scored.values, scored.scores)
        self.samples = self._choose_samples(scored.sequences, scored.scores)
        return means_of(scored)

    def score(
        self, tensors: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> ScoredResponses:
        """Wait for the scores of what `sample` sampled; keep these keys of the batch, or all."""
        with self.sampler.reward.awake():
            values = Scoring.concat([scoring for _, scoring in self._sampled]).result()
        model_scores = None
        if self.worker.reward_model.is_used:
            model_scores = torch.cat([self._model_scores(sequences) for sequences, _ in self._sampled])
        found = [self.categories.of(part.non_tensor_batch, len(part)) for part, _ in self._sampled]
        categories = {key: [name for part in found for name in part[key]] for key in self.categories.keys}
        sequences = DataProto.concat([sequences.select(tensors, columns) for sequences, _ in self._sampled])
        self._sampled = []
        scores, terms = add_terms(values, sequences.batch["response_mask"], model_scores, self.worker)
        return ScoredResponses(sequences, values, terms, scores.tolist(), categories)

    def _first_sequences(self) -> DataProto | None:
        """Return the responses to the first prompts, with every key; None if none are recorded."""
        wanted = self.num_recorded * self.sampler.validation_options.n
        parts = []
        for sequences, _ in self._sampled:
            if missing := wanted - sum(map(len, parts)):
                parts.append(sequences[: min(missing, len(sequences))])
        return DataProto.concat(parts) if wanted else None

    def _model_scores(self, sequences: DataProto) -> Tensor:
        padded, padding = pad_dataproto_to_divisor(sequences, self.dp_size)
        scored = self.workers.compute_reward_model_scores(padded)
        return unpad_dataproto(scored, padding).batch["reward_model_scores"]

    def _choose_samples(self, sequences: DataProto, scores: list[float]) -> list[Generation]:
        count = min(self.num_samples, len(sequences))
        rows = sorted(random.Random(SAMPLES_SEED).sample(range(len(sequences)), count))
        return [
            Generation(
                prompt=sequences.non_tensor_batch["prompt_text"][row],
                response=self.sampler.shown_response(sequences, row),
                ground_truth=str(sequences.non_tensor_batch["ground_truth"][row]),
                score=scores[row],
            )
            for row in rows
        ]


def as_finished(sequences: DataProto, values: Values, scores: Sequence[float]) -> DataProto:
    """Return the first scored sequences with keys of a finished batch of training, for `RolloutLog`."""
    count = len(sequences)
    totals = torch.tensor(scores[:count], dtype=torch.float64).nan_to_num()  # (B,)
    values = {name: column[:count] for name, column in values.items()}
    return sequences.merge({
        "row_ids": torch.arange(count),
        "token_level_scores": on_tokens(sequences, totals, values),
        "reward_values": reward_values(values),
    })  # fmt: skip


def means_of(scored: ScoredResponses) -> Metrics:
    """Compute the metrics of a validation; without any score there is no `val/reward_score`."""
    values = scored.values | {name: term.tolist() for name, term in scored.terms.items()}
    metrics = score_means("val/", values, scored.scores)
    metrics |= means_by_category(scored.categories, values, scored.scores)
    for name, key in (("val_response_length", "response_mask"), ("val_prompt_length", "prompt_mask")):
        mask = scored.sequences.batch[key]
        metrics |= length_metrics(name, mask.sum(-1), mask.shape[-1])
    return metrics
