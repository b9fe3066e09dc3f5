# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning, on one data-parallel rank."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import LossDenominators, aggregate_loss
from verl.config.model import as_number
from verl.config.sft import SFTActorConfig
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.updater import (
    FORWARD_KEYS,
    OBJECT_KEYS,
    MetricSums,
    Updater,
    UpdateSettings,
    forward_in_micro_batches,
)

ROLE = "train"  # names the metrics
TEMPERATURE = 1.0


class DataParallelSFT:
    """Teaches a model the responses of its rows: the mean of -log p over the tokens that are learned.

        loss = - sum_{i,t} m[i,t] log p(y[i,t] | y[i,<t]) / sum_{i,t} m[i,t]

    Both sums run over the whole step, on all ranks, so the loss does not depend on how it is cut.

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
        """Put the parts together.

        Args:
            config: `worker.actor`.
            forward: The sharded model behind the packed forward pass.
            group: The data-parallel ranks, None for all.
            optimizer: Of the model.
            scheduler: Of the optimizer's learning rate; stepped once for each training step.
        """
        self.config, self.forward, self.group = config, forward, group
        settings = UpdateSettings.of(ROLE, config, rollout_n=1, max_response_length=1)
        self.updater = Updater(forward, group, settings, optimizer, scheduler)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step; see `Updater.run`.

        Args:
            batch: This rank's rows of the step.

        Returns:
            Metrics over all ranks, the same on each.
        """
        return self.updater.run(batch.select(FORWARD_KEYS, OBJECT_KEYS), self._micro_batch_loss)

    @torch.no_grad()
    def losses(self, batch: DataProto) -> Tensor:
        """The sum of -log p over the tokens of each row that are learned, (B,) float64 on CPU.

        Every rank must call it: the ranks agree on the number of micro batches.
        """
        return forward_in_micro_batches(
            self.forward,
            batch.select(FORWARD_KEYS, OBJECT_KEYS),
            lambda micro_batch: -self._log_probs(micro_batch).double().sum(-1),
            size=as_number(self.config.micro_batch_size_per_device_for_experience),
            dynamic_batching=self.config.dynamic_batching,
            group=self.group,
        )

    def _micro_batch_loss(
        self, micro_batch: DataProto, denominators: LossDenominators, metrics: MetricSums
    ) -> Tensor:
        """Return the share of a micro batch in the loss of the step."""
        mask = micro_batch.batch["response_mask"]  # (B, T - 1)
        loss = aggregate_loss(-self._log_probs(micro_batch), mask, "token", denominators)
        metrics.add_loss(f"{ROLE}/loss", loss)
        return loss

    def _log_probs(self, micro_batch: DataProto) -> Tensor:
        """(B, T - 1), zero where nothing is learned."""
        return self.forward.log_probs(micro_batch, TEMPERATURE).log_probs
