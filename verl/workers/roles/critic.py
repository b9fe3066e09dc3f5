# SPDX-License-Identifier: Apache-2.0
"""Values and loss of the critic, on one data-parallel rank."""

from torch import Tensor

from verl.algorithms.aggregation import aggregate_loss
from verl.algorithms.value_losses import clipped_value_loss
from verl.config.worker import CriticConfig
from verl.protocol import DataProto
from verl.workers.packing.forward import FORWARD_KEYS, OBJECT_KEYS, PackedForward
from verl.workers.roles.updater import MicroBatch, MiniBatch, Training, Updater, compute_experience

UPDATE_KEYS = [*FORWARD_KEYS, "values", "returns"]


class DataParallelPPOCritic:
    """Estimates the return of the rest of a response, and learns from the returns.

    Example::

        critic = DataParallelPPOCritic(config.critic, forward, Training(optimizer, scheduler))
        values = critic.compute_values(batch)  # (B, R)
        metrics = critic.update(batch)  # {"critic/vf_loss": ..., "critic/grad_norm": ...}
    """

    def __init__(self, config: CriticConfig, forward: PackedForward, training: Training) -> None:
        self.config, self.forward = config, forward
        self.updater = Updater("critic", config, forward, training, config.ppo_epochs)

    def compute_values(self, batch: DataProto) -> Tensor:
        """(B, R) float32 on CPU: the value before each response token; collective over all ranks."""
        return compute_experience(self.config, self.forward, batch, self.forward.values)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Update the critic: an optimizer step for each mini batch and PPO epoch; collective over all ranks.

        Reads `values` (as computed before the update) and `returns`.
        """
        return self.updater.run(batch.select(UPDATE_KEYS, OBJECT_KEYS), self._loss)

    def _loss(self, micro_batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        tensors, metrics = micro_batch.tensors, mini_batch.metrics
        mask = tensors["loss_mask"]  # (B, R)
        values = self.forward.values(micro_batch.rows)
        value_loss = clipped_value_loss(
            values, tensors["values"], tensors["returns"], mask, self.config.cliprange_value
        )
        loss = aggregate_loss(value_loss.per_token, mask, self.config.loss_avg_mode, mini_batch.denominators)
        metrics.add_loss("critic/vf_loss", loss)
        for name, statistic in value_loss.statistics.items():
            metrics.add_mean(f"critic/{name}", statistic, mask)
        return loss
