# SPDX-License-Identifier: Apache-2.0
"""Scores the held-out prompts and keeps a few responses to read."""

import random
from collections.abc import Iterable

from verl.protocol import DataProto
from verl.trainer.config import PPOConfig
from verl.trainer.metrics import Metrics, compute_reward_metrics, length_metrics
from verl.trainer.rollout_collector import Sampler, sampling_options, with_uids
from verl.utils.logger.base import Generation
from verl.workers.rollout.base import SamplingOptions

SAMPLES_SEED = 42  # the same prompts are shown after every validation


class Validator:
    """Samples and scores every held-out prompt.

    `samples` holds `trainer.val_generations_to_log` of the last run's responses, always of the same prompts.
    """

    def __init__(self, config: PPOConfig, sampler: Sampler, loader: Iterable[DataProto] | None) -> None:
        self.config = config
        self.sampler = sampler
        self.loader = loader or ()
        self.has_prompts = loader is not None
        self.options = validation_options(config)
        self.samples: list[Generation] = []

    def run(self, step: int) -> Metrics:
        """Validate once; waits for workers and scores. The engine must be awake.

        Returns:
            `val/reward_score` (the mean of `overall`), `val/{key}_reward`, and the lengths.
        """
        batches, values = [], {}
        for number, prompts in enumerate(self.loader):
            sequences, scoring = self.sampler.sample(with_uids(prompts, f"val{step}-{number}"), self.options)
            batches.append(
                sequences.select(
                    ["responses", "response_mask", "prompt_mask"], ["prompt_text", "ground_truth"]
                )
            )
            for key, column in scoring.result().items():
                values.setdefault(key, []).extend(column)
        sequences = DataProto.concat(batches)
        self.samples = self._choose_samples(sequences, values["overall"])
        means = compute_reward_metrics(values, "val/")
        metrics = {f"{key}_reward": mean for key, mean in means.items()} | {
            "val/reward_score": means["val/overall"]
        }
        for name, key in (("val_response_length", "response_mask"), ("val_prompt_length", "prompt_mask")):
            mask = sequences.batch[key]
            metrics |= length_metrics(name, mask.sum(-1), mask.shape[-1])
        return metrics

    def _choose_samples(self, sequences: DataProto, scores: list[float]) -> list[Generation]:
        count = min(self.config.trainer.val_generations_to_log, len(sequences))
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


def validation_options(config: PPOConfig) -> SamplingOptions:
    """As training samples, but one response, and changed by `worker.rollout.val_override_config`."""
    return sampling_options(config).override({"n": 1} | config.worker.rollout.val_override_config)
