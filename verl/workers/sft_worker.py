# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning in a worker process: one device with a shard of the model and its optimizer.

The model is saved as `actor`, the policy's name, so that reinforcement learning can start from it.
"""

from torch import Tensor

from verl.batch_keys import TEACHER_KEYS
from verl.config.sft import SFTActorConfig, SFTWorkerConfig
from verl.distributed.device import memory_metrics, reset_peak_memory
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.base_worker import ModelWorker
from verl.workers.packing.forward import FORWARD_KEYS, OBJECT_KEYS, PackedForward
from verl.workers.roles.loss_terms import LossTerm, TokenLoss, sum_terms
from verl.workers.roles.teachers import Teachers
from verl.workers.roles.updater import MicroBatch, MiniBatch, Training, Updater, compute_experience

ROLE = "train"  # prefix of the metrics
TEMPERATURE = 1.0


class DataParallelSFT:
    """Trains a model on the responses of its rows: the mean of -log p over the tokens of `loss_mask`.

    loss = - sum_{i,t} m[i,t] log p(y[i,t] | y[i,<t]) / sum_{i,t} m[i,t]    over the whole step, on all ranks

    With teachers, the mean of their divergence is added to it, or replaces it.
    """

    def __init__(
        self,
        config: SFTActorConfig,
        forward: PackedForward,
        training: Training,
        teachers: Teachers | None = None,
    ) -> None:
        self.config, self.forward, self.teachers = config, forward, teachers
        has_task = teachers is None or teachers.loss.use_task_rewards
        self.terms = [
            LossTerm(f"{ROLE}/loss", float(has_task), lambda result, _: TokenLoss(-result.log_probs))
        ]
        if teachers is not None:
            self.terms.append(teachers.loss_term())
        self.updater = Updater(ROLE, config, forward, training)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Take an optimizer step on this rank's rows; collective over all ranks."""
        keys = [*FORWARD_KEYS, *(key for key in TEACHER_KEYS if key in batch.batch)]
        return self.updater.run(batch.select(keys, OBJECT_KEYS), self._loss)

    def losses(self, batch: DataProto) -> Tensor:
        """Sum -log p over the learned tokens of each row, (B,) float64 on CPU; collective over all ranks."""

        def losses(micro_batch: DataProto) -> Tensor:
            return -self.forward.log_probs(micro_batch, TEMPERATURE).log_probs.double().sum(-1)

        return compute_experience(self.config, self.forward, batch, losses)

    def _loss(self, micro_batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        divergence = self.teachers and self.teachers.divergence(micro_batch.rows, TEMPERATURE)
        result = self.forward.log_probs(micro_batch.rows, TEMPERATURE, divergence=divergence)
        return sum_terms(self.terms, result, micro_batch.tensors, mini_batch, "token")


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
        self.sft = DataParallelSFT(actor, self.policy.forward, training, self.teachers)

    @register(Dispatch.SHARD, phase="update_actor")
    def update(self, batch: DataProto) -> dict[str, float]:
        """Take a step on this rank's rows; the metrics are equal on all ranks."""
        reset_peak_memory(self.options.device)
        loaded = self._loaded(batch, self.policy, *self.teacher_models.values(), with_optimizer=True)
        with self._utilization("actor") as mfu, loaded:
            metrics = self.sft.update(batch)
        return metrics | mfu | memory_metrics(self.options.device) | self._encoded_media()

    @register(Dispatch.SHARD, phase="validation")
    def compute_losses(self, batch: DataProto) -> DataProto:
        """Compute `losses` (B,) float64, the sum of -log p over the learned tokens of each row."""
        with self._loaded(batch, self.policy):
            return DataProto.from_dict({"losses": self.sft.losses(batch)})
