# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning, as ordinary Python in one CPU process.

`train_step` is a step; `TrainingLoop` runs one after another, validates and saves. The worker group owns the
devices, `SavedRun` saves and resumes.
"""

from collections.abc import Iterator

from verl.config.sft import SFTConfig
from verl.data.loader import PromptLoader
from verl.logger.tracker import Tracker
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import Metrics, StageTimer, length_metrics
from verl.trainer.rollouts.balancing import balance_over_ranks
from verl.trainer.run.checkpointing import SavedRun
from verl.trainer.training_loop import TrainingLoop


class SFTTrainer(TrainingLoop):
    """Teaches the policy the assistant's turns of conversations.

    One step: rows -> update of the policy.
    """

    def __init__(
        self,
        config: SFTConfig,
        workers: RayWorkerGroup,
        batches: Iterator[DataProto],
        validation: PromptLoader | None,
        run_state: SavedRun,
        tracker: Tracker,
    ) -> None:
        """Put the parts together.

        Args:
            config: Of the run.
            workers: Hold the model.
            batches: The rows of one step after another, without end.
            validation: Held-out rows; None validates nothing.
            run_state: Of the run, at its start.
            tracker: Takes the metrics.
        """
        super().__init__(config.trainer, workers, run_state, tracker)
        self.config = config
        self.batches = batches
        self.validation = validation

    def train_step(self, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Take one optimizer step on the next rows, which are spread over the ranks by their lengths."""
        with timer("read"):
            batch = next(self.batches)
        order, metrics = balance_over_ranks(batch, len(batch), 1, self.config.dp_size)
        with timer("update_actor"):
            return batch, metrics | self.workers.update(batch[order])[0]  # equal on all ranks

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """Lengths of the rows, and how many of their tokens are learned."""
        lengths = batch.batch["attention_mask"].sum(-1)  # (B,)
        learned = batch.batch["response_mask"].sum(-1)  # (B,)
        metrics = length_metrics("sequence_length", lengths, batch.batch["attention_mask"].shape[-1])
        return metrics | {
            "train/num_tokens": float(learned.sum()),
            "train/token_share": (learned.sum() / lengths.sum()).item(),
        }

    def validate(self, timer: StageTimer) -> Metrics:
        """The mean of -log p over the tokens of the held-out rows that are learned, `val/loss`."""
        if self.validation is None:
            return {}
        loss = num_tokens = 0.0
        with timer("validation"):
            for batch in self.validation:
                padded, pad_size = pad_dataproto_to_divisor(batch, self.config.dp_size)
                losses = unpad_dataproto(self.workers.compute_losses(padded), pad_size).batch["losses"]
                loss += losses.sum().item()
                num_tokens += batch.batch["response_mask"].sum().item()
        self.run_state.record_score(-loss / num_tokens)  # the best checkpoint is kept: the higher the better
        return {"val/loss": loss / num_tokens}
