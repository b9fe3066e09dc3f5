# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning, on one data-parallel rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.aggregation import aggregate_loss
from verl.config.sft import SFTActorConfig
from verl.protocol import DataProto
from verl.workers.packing.forward import FORWARD_KEYS, OBJECT_KEYS, PackedForward
from verl.workers.roles.updater import MicroBatch, MiniBatch, Training, Updater, compute_experience

ROLE = "train"  # prefix of the metrics
TEMPERATURE = 1.0


class DataParallelSFT:
    """Trains a model on the responses of its rows: the mean of -log p over the tokens of `loss_mask`.

    loss = - sum_{i,t} m[i,t] log p(y[i,t] | y[i,<t]) / sum_{i,t} m[i,t]    over the whole step, on all ranks
    """

    def __init__(
        self,
        config: SFTActorConfig,
        forward: PackedForward,
        group: dist.ProcessGroup | None,
        training: Training,
    ) -> None:
        self.config, self.forward, self.group = config, forward, group
        self.updater = Updater(ROLE, config, forward, group, training)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Take an optimizer step on this rank's rows; collective over all ranks."""
        for mini_batch in self.updater.mini_batches(batch.select(FORWARD_KEYS, OBJECT_KEYS)):
            for micro_batch in mini_batch.micro_batches():
                self.updater.backward(self._loss(micro_batch, mini_batch))
            self.updater.step()
        return self.updater.finish()

    @torch.no_grad()
    def losses(self, batch: DataProto) -> Tensor:
        """Sum -log p over the learned tokens of each row, (B,) float64 on CPU; collective over all ranks."""

        def losses(micro_batch: DataProto) -> Tensor:
            return -self._log_probs(micro_batch).double().sum(-1)

        return compute_experience(self.config, self.forward, self.group, batch, losses)

    def _loss(self, micro_batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        mask = micro_batch.tensors["loss_mask"]  # (B, T - 1)
        loss = aggregate_loss(-self._log_probs(micro_batch.rows), mask, "token", mini_batch.denominators)
        mini_batch.metrics.add_loss(f"{ROLE}/loss", loss)
        return loss

    def _log_probs(self, micro_batch: DataProto) -> Tensor:
        # (B, T - 1), zero where nothing is learned
        return self.forward.log_probs(micro_batch, TEMPERATURE).log_probs
