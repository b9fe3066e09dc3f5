# SPDX-License-Identifier: Apache-2.0
"""The value model's estimates and its loss, on one data-parallel rank."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import LossDenominators, aggregate_loss
from verl.algorithms.value_losses import ValueLossInputs, clipped_value_loss
from verl.config.model import as_number
from verl.config.worker import CriticConfig
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

UPDATE_KEYS = [*FORWARD_KEYS, "values", "returns"]


class DataParallelPPOCritic:
    """Estimates what the rest of a response will earn, and learns from what it earned.

    Example::

        critic = DataParallelPPOCritic(config.critic, forward, group, optimizer, scheduler, rollout_n=1, ...)
        values = critic.compute_values(batch)  # (B, R)
        metrics = critic.update(batch)  # {"critic/vf_loss": ..., "critic/grad_norm": ...}
    """

    def __init__(
        self,
        config: CriticConfig,
        forward: PackedForward,
        group: dist.ProcessGroup | None,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        *,
        rollout_n: int,
        max_response_length: int,
    ) -> None:
        """Put the parts together.

        Args:
            config: `worker.critic`.
            forward: The sharded value model behind the packed forward pass.
            group: The data-parallel ranks, None for all.
            optimizer: Of the value model.
            scheduler: Of the optimizer's learning rate; stepped once for each training step.
            rollout_n: Responses to each prompt: `global_batch_size` counts prompts.
            max_response_length: Tokens: the scale of `seq_sum_norm`.
        """
        self.config = config
        self.forward = forward
        self.group = group
        settings = UpdateSettings.of(
            "critic",
            config,
            rollout_n=rollout_n,
            max_response_length=max_response_length,
            ppo_epochs=config.ppo_epochs,
        )
        self.updater = Updater(forward, group, settings, optimizer, scheduler)

    @torch.no_grad()
    def compute_values(self, batch: DataProto) -> Tensor:
        """The value before each response token, (B, R) float32 on CPU, zero on padding.

        Every rank must call it: the ranks agree on the number of micro batches.
        """
        return forward_in_micro_batches(
            self.forward,
            batch.select(FORWARD_KEYS, OBJECT_KEYS),
            self.forward.values,
            size=as_number(self.config.micro_batch_size_per_device_for_experience),
            dynamic_batching=self.config.dynamic_batching,
            group=self.group,
        )

    def update(self, batch: DataProto) -> dict[str, float]:
        """Update the value model: an optimizer step for each mini batch and PPO epoch; see `Updater.run`.

        Args:
            batch: This rank's sequences, with `values` (as computed before the update) and `returns`.

        Returns:
            Metrics over all ranks, the same on each.

        Raises:
            ValueError: The rows do not divide into mini batches.
        """
        return self.updater.run(batch.select(UPDATE_KEYS, OBJECT_KEYS), self._micro_batch_loss)

    def _micro_batch_loss(
        self, micro_batch: DataProto, denominators: LossDenominators, metrics: MetricSums
    ) -> Tensor:
        """Return the share of a micro batch in the loss of its mini batch."""
        tensors = micro_batch.batch
        mask = tensors["response_mask"]  # (B, R)
        found = clipped_value_loss(
            ValueLossInputs(
                values=self.forward.values(micro_batch),
                old_values=tensors["values"],
                returns=tensors["returns"],
                response_mask=mask,
                cliprange_value=self.config.cliprange_value,
            )
        )
        loss = aggregate_loss(found.per_token, mask, self.config.loss_avg_mode, denominators)
        metrics.add_loss("critic/vf_loss", loss)
        for name, values in found.statistics.items():
            metrics.add_tokens(f"critic/{name}", values, mask)
        return loss
