# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning, on one data-parallel rank."""

import torch.distributed as dist
from torch import Tensor

from verl.batch_keys import TEACHER_KEYS
from verl.config.sft import SFTActorConfig
from verl.protocol import DataProto
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
        group: dist.ProcessGroup | None,
        training: Training,
        teachers: Teachers | None = None,
    ) -> None:
        self.config, self.forward, self.group, self.teachers = config, forward, group, teachers
        has_task = teachers is None or teachers.loss.use_task_rewards
        self.terms = [
            LossTerm(f"{ROLE}/loss", float(has_task), lambda result, _: TokenLoss(-result.log_probs))
        ]
        if teachers is not None:
            self.terms.append(teachers.loss_term())
        self.updater = Updater(ROLE, config, forward, group, training)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Take an optimizer step on this rank's rows; collective over all ranks."""
        keys = [*FORWARD_KEYS, *(key for key in TEACHER_KEYS if key in batch.batch)]
        return self.updater.run(batch.select(keys, OBJECT_KEYS), self._loss)

    def losses(self, batch: DataProto) -> Tensor:
        """Sum -log p over the learned tokens of each row, (B,) float64 on CPU; collective over all ranks."""

        def losses(micro_batch: DataProto) -> Tensor:
            return -self.forward.log_probs(micro_batch, TEMPERATURE).log_probs.double().sum(-1)

        return compute_experience(self.config, self.forward, self.group, batch, losses)

    def _loss(self, micro_batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        divergence = self.teachers and self.teachers.divergence(micro_batch.rows, TEMPERATURE)
        result = self.forward.log_probs(micro_batch.rows, TEMPERATURE, divergence=divergence)
        return sum_terms(self.terms, result, micro_batch.tensors, mini_batch, "token")
