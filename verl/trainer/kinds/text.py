# SPDX-License-Identifier: Apache-2.0
"""Parts of a reinforcement learning run that depend on its policy's output, here text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from verl.agents.setup import check_conversations, schemas_of
from verl.config.algorithm import AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig
from verl.data.loader import PromptLoader
from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions
from verl.data.readers import Readers, load_readers
from verl.logger.tracker import Tracker
from verl.protocol import DataProto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.single_controller.worker import Worker
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.rollouts.engines import Engines
from verl.trainer.rollouts.group_filter import make_early_stop, make_group_filter, make_quota
from verl.trainer.rollouts.rollout_log import RolloutLog
from verl.trainer.rollouts.sampler import OnScored, Sampler
from verl.trainer.validation import Categories, Validator
from verl.workers.fsdp_worker import FSDPWorker


@dataclass(frozen=True)
class TextRun:
    """Builds the parts of a trainer for prompts of text and media; a run of another kind overrides them."""

    worker_class: ClassVar[type[Worker]] = FSDPWorker  # of processes that train and sample

    data: DataConfig
    worker: WorkerConfig
    trainer: TrainerConfig

    def readers(self, media: MediaOptions, cache: MediaCache) -> Readers:
        """Load the readers of prompts, and check them."""
        multi_turn = self.worker.rollout.multi_turn
        tools = schemas_of(multi_turn)
        readers = load_readers(self.worker.actor.model, self.data.override_chat_template, media, cache, tools)
        if multi_turn.enable:
            check_conversations(readers, self.data, multi_turn)
        return readers

    def rollout_log(self, readers: Readers) -> RolloutLog:
        trainer = self.trainer
        return RolloutLog(
            Path(trainer.checkpoint_folder), trainer.rollouts_to_keep, readers.tokenizer, readers.media,
            skip_special_tokens=self.worker.reward.skip_special_tokens, tools=readers.tools,
            keep_whole_images=trainer.keep_whole_images,
        )  # fmt: skip

    def sampler(
        self, engines: Engines, reward: Any, readers: Readers, tracker: Tracker, rollout_log: RolloutLog,
        on_scored: OnScored | None = None,
    ) -> Sampler:  # fmt: skip
        """Return the sampler, which also has responses scored."""
        shows_training = self.trainer.async_training.samples_ahead
        is_silent = self.worker.rollout.disable_tqdm or shows_training
        on_progress = None if is_silent else tracker.progress
        return Sampler(self.data, self.worker, engines, reward, readers.tokenizer, on_progress, on_scored)

    def collector(
        self,
        sampler: Sampler,
        prompts: Iterator[DataProto],
        mini_batches: Iterable[int],  # prompts in an update, of each role
        algorithm: AlgorithmConfig,
    ) -> RolloutCollector:
        group_filter = make_group_filter(algorithm, self.trainer.rejection_sample)
        quota = make_quota(self.data, self.trainer, mini_batches)
        early_stop = make_early_stop(algorithm, group_filter, self.data.seed)
        reward = self.worker.reward
        return RolloutCollector(sampler, prompts, group_filter, quota, algorithm, reward, early_stop)

    def validator(
        self, sampler: Sampler, workers: RayWorkerGroup, loader: PromptLoader | None, dp_size: int
    ) -> Validator:
        trainer, categories = self.trainer, Categories(self.data.categories, self.data.answer_key)
        counts = trainer.val_generations_to_log, trainer.rollouts_to_keep
        return Validator(sampler, workers, loader, self.worker, dp_size, *counts, categories)
