# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning, as ordinary Python in one CPU process; `TrainingLoop` repeats its `train_step`."""

from collections.abc import Iterator

from verl.config.trainer import RunConfig
from verl.data.loader import PromptLoader
from verl.logger.tracker import Tracker
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import Metrics, StageTimer, length_metrics
from verl.trainer.rollouts.balancing import balance_over_ranks
from verl.trainer.run.checkpointing import RunState
from verl.trainer.training_loop import TrainingLoop


class SFTTrainer(TrainingLoop):
    """Trains the policy on the assistant's turns of conversations. One step: rows -> update of the policy."""

    validates_by_loss = True

    def __init__(
        self,
        run: RunConfig,
        workers: RayWorkerGroup,
        batches: Iterator[DataProto],  # of one step after another, without end
        validation: PromptLoader | None,  # None skips validation
        dp_size: int,
        run_state: RunState,
        tracker: Tracker,
    ) -> None:
        super().__init__(run, workers, run_state, tracker)
        self.batches, self.validation, self.dp_size = batches, validation, dp_size

    def train_step(self, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Take one optimizer step on the next rows."""
        with timer("read"):
            batch = next(self.batches)
        order, metrics = balance_over_ranks(batch, len(batch), 1, self.dp_size)
        with timer("update_actor"):
            return batch, metrics | self.workers.update(batch[order])[0]  # equal on all ranks

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """Compute the lengths of the rows, and the number and share of trained tokens."""
        lengths = batch.batch["attention_mask"].sum(-1)  # (B,)
        trained = batch.batch["loss_mask"].sum(-1)  # (B,)
        metrics = length_metrics("sequence_length", lengths, batch.batch["attention_mask"].shape[-1])
        return metrics | {
            "train/num_tokens": float(trained.sum()),
            "train/token_share": (trained.sum() / lengths.sum()).item(),
        }

    def validate(self, timer: StageTimer) -> Metrics:
        """Compute `val/loss`, the mean of -log p over the trained tokens of the held-out rows."""
        if self.validation is None:
            return {}
        loss = num_tokens = 0.0
        with timer("validation"):
            for batch in self.validation:
                padded, pad_size = pad_dataproto_to_divisor(batch, self.dp_size)
                losses = unpad_dataproto(self.workers.compute_losses(padded), pad_size).batch["losses"]
                loss += losses.sum().item()
                num_tokens += batch.batch["loss_mask"].sum().item()
        self.run_state.record_score(-loss / num_tokens)  # the checkpoint with the highest score is kept
        return {"val/loss": loss / num_tokens}
