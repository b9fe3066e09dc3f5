# SPDX-License-Identifier: Apache-2.0
"""The loop of supervised fine-tuning, as ordinary Python in one CPU process.

`fit` runs steps, validates and saves; `update` is a step. The worker group owns the devices, `SavedRun` saves
and resumes.
"""

from collections.abc import Iterator

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.balancing import balance_over_ranks
from verl.trainer.data_loader import PromptLoader
from verl.trainer.metrics import (
    Metrics,
    StageTimer,
    compute_throughput_metrics,
    compute_timing_metrics,
    length_metrics,
)
from verl.trainer.profiling import StepProfiles
from verl.trainer.saved_run import SavedRun
from verl.trainer.sft_config import SFTConfig
from verl.trainer.stopping import StopRequest
from verl.utils.logger.tracker import Tracker


class SFTTrainer:
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
        self.config = config
        self.workers = workers
        self.batches = batches
        self.validation = validation
        self.run_state = run_state
        self.tracker = tracker
        self.stop = StopRequest()
        self.profiles = StepProfiles(config.trainer, workers)

    def fit(self) -> None:
        """Train until the last step or a request to stop, validating and saving on the way."""
        self.run_state.load()
        with self.stop.listening():
            self.train()
            self.run_state.settle()

    def train(self) -> None:
        """The steps of the run from where it stands."""
        trainer, state = self.config.trainer, self.run_state
        if trainer.val_before_train:
            self.tracker.begin_step(state.step)
            self.tracker.log(self.validate(StageTimer(self.tracker.stage)), state.step)

        while state.step < state.training_steps and not self.stop.signal:
            state.step += 1
            self.tracker.begin_step(state.step)
            timer = StageTimer(self.tracker.stage)
            with self.profiles.recording(state.step), timer("step"):
                with timer("read"):
                    batch = next(self.batches)
                metrics = self.update(batch, timer)
                if state.is_due(trainer.val_freq):
                    metrics |= self.validate(timer)
                if state.is_due(trainer.save_freq) or self.stop.signal or state.unsaved:
                    with timer("save_checkpoint"):
                        state.save()
                state.publish()  # what was written meanwhile
            metrics |= compute_sft_metrics(batch) | compute_timing_metrics(batch, timer.seconds)
            metrics |= compute_throughput_metrics(batch, timer.seconds["step"], self.workers.world_size)
            self.tracker.log(metrics, state.step)
            self.profiles.report(state.step, metrics)

    def update(self, batch: DataProto, timer: StageTimer) -> Metrics:
        """Take one optimizer step on the rows, which are spread over the ranks by their lengths."""
        order, metrics = balance_over_ranks(batch, len(batch), 1, self.config.dp_size)
        with timer("update_actor"):
            return metrics | self.workers.update(batch[order])[0]  # equal on all ranks

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


def compute_sft_metrics(batch: DataProto) -> Metrics:
    """Lengths of the rows, and how many of their tokens are learned."""
    lengths = batch.batch["attention_mask"].sum(-1)  # (B,)
    learned = batch.batch["response_mask"].sum(-1)  # (B,)
    metrics = length_metrics("sequence_length", lengths, batch.batch["attention_mask"].shape[-1])
    return metrics | {
        "train/num_tokens": float(learned.sum()),
        "train/token_share": (learned.sum() / lengths.sum()).item(),
    }
