# SPDX-License-Identifier: Apache-2.0
"""Scores the held-out prompts and keeps a few responses to read."""

import math
import random
from collections.abc import Iterable

import torch
from torch import Tensor

from verl.config.worker import WorkerConfig
from verl.logger.base import Generation
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.metrics import Metrics, compute_reward_metrics, length_metrics
from verl.trainer.rollouts.sampler import Sampler, with_uids
from verl.trainer.rollouts.scores import Scoring, Values, add_terms, on_last_tokens, reward_values

SHOWN, SHOWN_COLUMNS = ["responses", "response_mask", "prompt_mask"], ["prompt_text", "ground_truth"]
SAMPLES_SEED = 42  # the same prompts are shown after every validation


class Validator:
    """Samples and scores every held-out prompt.

    Args:
        num_samples: Responses to show: `trainer.val_generations_to_log`.
        num_recorded: First prompts whose responses are recorded: `trainer.rollouts_to_keep`.

    Attributes:
        samples: The responses to show of the last validation, always to the same prompts.
        recorded: The responses to the first prompts with their scores, for `RolloutLog`; None without any.
    """

    def __init__(
        self,
        sampler: Sampler,
        loader: Iterable[DataProto] | None,
        worker: WorkerConfig,
        dp_size: int,
        num_samples: int,
        num_recorded: int = 0,
    ) -> None:
        self.sampler = sampler
        self.loader = loader or ()
        self.has_prompts = loader is not None
        self.worker = worker
        self.dp_size = dp_size
        self.num_samples = num_samples
        self.num_recorded = num_recorded
        self.samples: list[Generation] = []
        self.recorded: DataProto | None = None
        self._sampled: list[tuple[DataProto, Scoring]] = []

    def sample(self, step: int) -> None:
        """Sample a response to every prompt; the engine must be awake."""
        self._sampled = [
            self.sampler.sample(with_uids(prompts, f"val{step}-{number}"), self.sampler.validation_options)
            for number, prompts in enumerate(self.loader)
        ]

    def measure(self) -> Metrics:
        """Wait for the scores and return their means, without the responses whose scoring failed.

        `val/reward_score` is the mean of the scores that training would use: `overall` plus the overlong
        penalty and the reward model's weighted score, if there are any.
        """
        values = Scoring([scoring.result for _, scoring in self._sampled]).result()
        model_scores = None
        if self.worker.reward_model.is_used:
            model_scores = torch.cat([self._model_scores(sequences) for sequences, _ in self._sampled])
        sequences = DataProto.concat(
            [sequences.select(SHOWN, SHOWN_COLUMNS) for sequences, _ in self._sampled]
        )
        scores, terms = add_terms(values, sequences.batch["response_mask"], model_scores, self.worker)
        self.recorded = self._first_sequences(values, scores)
        self._sampled = []
        totals = scores.tolist()
        self.samples = self._choose_samples(sequences, totals)
        means = compute_reward_metrics(values | {name: term.tolist() for name, term in terms.items()}, "val/")
        metrics = {f"{key}_reward": mean for key, mean in means.items()}
        scored = [total for total in totals if not math.isnan(total)]
        if not scored:
            raise RuntimeError("the reward function failed for every response of the validation")
        metrics["val/reward_score"] = sum(scored) / len(scored)
        for name, key in (("val_response_length", "response_mask"), ("val_prompt_length", "prompt_mask")):
            mask = sequences.batch[key]
            metrics |= length_metrics(name, mask.sum(-1), mask.shape[-1])
        return metrics

    def _first_sequences(self, values: Values, scores: Tensor) -> DataProto | None:
        """Return the sequences of the first prompts in the form of a finished training batch."""
        wanted = self.num_recorded * self.sampler.validation_options.n
        parts = []
        for sequences, _ in self._sampled:
            if missing := wanted - sum(map(len, parts)):
                parts.append(sequences[: min(missing, len(sequences))])
        if not wanted:
            return None
        first = DataProto.concat(parts)
        mask, count = first.batch["response_mask"], len(first)
        on_tokens = on_last_tokens(scores[:count].nan_to_num().float(), mask)
        columns = {name: column[:count] for name, column in values.items()}
        return first.merge({
            "row_ids": torch.arange(count),
            "token_level_scores": on_tokens,
            "reward_values": reward_values(columns),
        })  # fmt: skip

    def _model_scores(self, sequences: DataProto) -> Tensor:
        padded, padding = pad_dataproto_to_divisor(sequences, self.dp_size)
        scored = self.sampler.workers.compute_reward_model_scores(padded)
        return unpad_dataproto(scored, padding).batch["reward_model_scores"]

    def _choose_samples(self, sequences: DataProto, scores: list[float]) -> list[Generation]:
        count = min(self.num_samples, len(sequences))
        responses, mask = sequences.batch["responses"], sequences.batch["response_mask"].bool()
        rows = sorted(random.Random(SAMPLES_SEED).sample(range(len(sequences)), count))
        return [
            Generation(
                prompt=sequences.non_tensor_batch["prompt_text"][row],
                response=self.sampler.decode(responses[row][mask[row]].tolist()),
                ground_truth=str(sequences.non_tensor_batch["ground_truth"][row]),
                score=scores[row],
            )
            for row in rows
        ]
