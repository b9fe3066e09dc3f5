# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning, on one data-parallel rank."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import aggregate_loss
from verl.config.sft_options import SFTActorConfig
from verl.config.update_options import as_number
from verl.protocol import DataProto
from verl.workers.packing.forward import FORWARD_KEYS, OBJECT_KEYS, PackedForward
from verl.workers.packing.schedule import forward_in_micro_batches
from verl.workers.roles.updater import MiniBatch, Updater

ROLE = "train"  # prefix of the metrics
TEMPERATURE = 1.0


class DataParallelSFT:
    """Trains a model on the responses of its rows: the mean of -log p over the tokens of `response_mask`.

        loss = - sum_{i,t} m[i,t] log p(y[i,t] | y[i,<t]) / sum_{i,t} m[i,t]

    Both sums run over the whole step, on all ranks.

    Example::

        sft = DataParallelSFT(config, forward, group, optimizer, scheduler)
        metrics = sft.update(batch)  # {"train/loss": ..., "train/grad_norm": ...}
        losses = sft.losses(batch)  # (B,)
    """

    def __init__(
        self,
        config: SFTActorConfig,
        forward: PackedForward,
        group: dist.ProcessGroup | None,
        optimizer: Optimizer,
        scheduler: LRScheduler,
    ) -> None:
        """Build the role; see `Updater` for the arguments, `config` is `worker.actor`."""
        self.config, self.forward, self.group = config, forward, group
        self.updater = Updater(ROLE, config, forward, group, optimizer, scheduler)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Take an optimizer step on this rank's rows; collective over all ranks.

        Returns:
            Metrics over all ranks, see `Updater.finish`.
        """
        for mini_batch in self.updater.mini_batches(batch.select(FORWARD_KEYS, OBJECT_KEYS)):
            for micro_batch in mini_batch.micro_batches():
                self.updater.backward(self._loss(micro_batch, mini_batch))
            self.updater.step()
        return self.updater.finish()

    @torch.no_grad()
    def losses(self, batch: DataProto) -> Tensor:
        """The sum of -log p over the learned tokens of each row, (B,) float64 on CPU; collective."""
        return forward_in_micro_batches(
            self.forward,
            batch.select(FORWARD_KEYS, OBJECT_KEYS),
            lambda micro_batch: -self._log_probs(micro_batch).double().sum(-1),
            size=as_number(self.config.micro_batch_size_per_device_for_experience),
            dynamic_batching=self.config.dynamic_batching,
            group=self.group,
        )

    def _loss(self, micro_batch: DataProto, mini_batch: MiniBatch) -> Tensor:
        mask = micro_batch.batch["response_mask"]  # (B, T - 1)
        loss = aggregate_loss(-self._log_probs(micro_batch), mask, "token", mini_batch.denominators)
        mini_batch.metrics.add_loss(f"{ROLE}/loss", loss)
        return loss

    def _log_probs(self, micro_batch: DataProto) -> Tensor:
        # (B, T - 1), zero where nothing is learned
        return self.forward.log_probs(micro_batch, TEMPERATURE).log_probs
