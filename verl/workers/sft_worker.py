# SPDX-License-Identifier: Apache-2.0
"""The worker process of supervised fine-tuning: one device with a shard of the model and its optimizer.

The model is saved as `actor`, the policy's name, so that reinforcement learning can start from it.
"""

import time

from verl.config.sft import SFTWorkerConfig
from verl.distributed.device import memory_metrics, reset_peak_memory
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.base_worker import ModelWorker
from verl.workers.roles.sft import DataParallelSFT
from verl.workers.roles.updater import Training


class SFTWorker(ModelWorker):
    """One process of the group that fine-tunes a model."""

    config: SFTWorkerConfig

    @register(Dispatch.ALL, phase="init_model")
    def init_model(self) -> None:
        actor = self.config.actor
        self._prepare(actor)
        self.policy = self._build_model("actor", actor, actor.model, optim=actor.optim)
        self._build_teachers(self.options.distillation)
        training = Training(*self.policy.training)
        self.sft = DataParallelSFT(actor, self.policy.forward, self.group, training, self.teachers)

    @register(Dispatch.SHARD, phase="update_actor")
    def update(self, batch: DataProto) -> dict[str, float]:
        """Take a step on this rank's rows; the metrics are equal on all ranks."""
        reset_peak_memory(self.options.device)
        start = time.perf_counter()
        with self._loaded(batch, self.policy, *self.teacher_models.values(), with_optimizer=True):
            metrics = self.sft.update(batch)
        learned = int(batch.batch["loss_mask"].sum())
        metrics |= self._mfu(self.policy, batch, time.perf_counter() - start, num_response_tokens=learned)
        return metrics | memory_metrics(self.options.device) | self._encoded_media()

    @register(Dispatch.SHARD, phase="validation")
    def compute_losses(self, batch: DataProto) -> DataProto:
        """Compute `losses` (B,) float64, the sum of -log p over the learned tokens of each row."""
        with self._loaded(batch, self.policy):
            return DataProto.from_dict({"losses": self.sft.losses(batch)})
