# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps over mini batches, the same for every model that is trained.

The loss of a mini batch is one number, whatever the ranks and micro batches it is computed on: each micro
batch contributes its share, divided by the tokens or sequences of the whole mini batch
(`algorithms/aggregation.py`), and shares and gradients are summed.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import LossDenominators, count_denominators
from verl.config.model import TrainedModelConfig, as_number
from verl.distributed.fsdp import clip_grad_norm
from verl.protocol import DataProto
from verl.utils.masking import masked_sum
from verl.utils.rank_logger import get_logger
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.micro_batches import RowCounts
from verl.workers.packing.schedule import MicroBatchSchedule
from verl.workers.packing.sp_strategy import StrategyLimits

logger = get_logger(__name__)

FORWARD_KEYS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
OBJECT_KEYS = ["uid", "multi_modal_data"]

MicroBatchLoss = Callable[[DataProto, LossDenominators, "MetricSums"], Tensor]


@dataclass(frozen=True)
class UpdateSettings:
    """How a model is updated."""

    role: str  # names its metrics and its section of the options: "actor", "critic", "prime"
    global_batch_size: int  # prompts in a mini batch
    rollout_n: int  # responses to each prompt
    micro_batch_size: int  # sequences on one rank at once
    dynamic_batching: bool
    ppo_epochs: int
    max_grad_norm: float
    max_response_length: int  # tokens: the scale of `seq_sum_norm`

    @classmethod
    def of(
        cls,
        role: str,
        config: TrainedModelConfig,
        *,
        rollout_n: int,
        max_response_length: int,
        ppo_epochs: int = 1,
    ) -> "UpdateSettings":
        """Take them from the section of a role."""
        return cls(
            role=role,
            global_batch_size=config.global_batch_size,
            rollout_n=rollout_n,
            micro_batch_size=as_number(config.micro_batch_size_per_device_for_update),
            dynamic_batching=config.dynamic_batching,
            ppo_epochs=ppo_epochs,
            max_grad_norm=config.max_grad_norm,
            max_response_length=max_response_length,
        )


class Updater:
    """Runs the optimizer of one sharded model.

    Example::

        updater = Updater(forward, group, settings, optimizer, scheduler)
        metrics = updater.run(batch, micro_batch_loss)  # {"actor/pg_loss": ..., "actor/grad_norm": ...}
    """

    def __init__(
        self,
        forward: PackedForward,
        group: dist.ProcessGroup | None,
        settings: UpdateSettings,
        optimizer: Optimizer,
        scheduler: LRScheduler,
    ) -> None:
        """Put the parts together.

        Args:
            forward: The sharded model behind the packed forward pass.
            group: The data-parallel ranks, that have other rows; None for all.
            settings: Sizes and limits.
            optimizer: Of the model's parameters.
            scheduler: Of the optimizer's learning rate; stepped once for each training step.
        """
        self.forward = forward
        self.group = group
        self.settings = settings
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.dp_size = dist.get_world_size(group)
        self.world_size = dist.get_world_size()
        self.mini_batch_rows = settings.global_batch_size * settings.rollout_n // self.dp_size

    def run(
        self,
        batch: DataProto,
        micro_batch_loss: MicroBatchLoss,
        prepare: Callable[[DataProto], DataProto] | None = None,
    ) -> dict[str, float]:
        """Take an optimizer step for each mini batch and PPO epoch, then one of the scheduler.

        The rows come in the order of the mini batches, this rank's share of each next to each other. A mini
        batch whose gradient is not finite changes nothing but `<role>/skipped_updates`; the scheduler counts
        training steps and moves on all the same. Every rank must call it.

        Args:
            batch: This rank's sequences, with what `micro_batch_loss` reads.
            micro_batch_loss: Called with a micro batch on the device, the denominators of its mini batch and
                the metrics; returns the micro batch's share of the mini batch's loss.
            prepare: Called with each mini batch before it is cut, under the weights that it is computed with;
                returns it with more keys. For what a loss needs to know of the whole mini batch.

        Returns:
            Metrics over all ranks, the same on each. Losses are means over mini batches of the loss that was
            minimised; the rest are means over the response tokens of the step.

        Raises:
            ValueError: The rows do not divide into mini batches.
        """
        self._check_rows(len(batch))
        mini_batches = batch.split(self.mini_batch_rows)
        denominators = self._global_denominators(mini_batches)
        metrics = MetricSums(self.forward.device)
        norms = []
        for _ in range(self.settings.ppo_epochs):
            for mini_batch, counts in zip(mini_batches, denominators, strict=True):
                prepared = mini_batch if prepare is None else prepare(mini_batch)
                self.forward.model.train()
                self._accumulate_gradients(prepared, counts, micro_batch_loss, metrics)
                norms.append(self._step())
        learning_rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        return metrics.reduce(self.group, len(norms), line=self.forward.sp.group) | self._update_metrics(
            norms, learning_rate
        )

    def _check_rows(self, rows: int) -> None:
        settings = self.settings
        if not self.mini_batch_rows or rows % self.mini_batch_rows:
            raise ValueError(
                f"`worker.{settings.role}.global_batch_size` ({settings.global_batch_size} prompts,"
                f" {self.mini_batch_rows} sequences on each of {self.dp_size} ranks) must divide the"
                f" {rows} sequences of a rank"
            )

    def _accumulate_gradients(
        self,
        mini_batch: DataProto,
        denominators: LossDenominators,
        micro_batch_loss: MicroBatchLoss,
        metrics: "MetricSums",
    ) -> None:
        """Run forward and backward on each micro batch; the gradients add up in the parameters.

        Gradients are reduced over ranks after every micro batch: keeping them until the last one would hold
        an unsharded gradient of the whole model on every device.
        """
        settings, sp = self.settings, self.forward.sp
        passes = divide(
            self.forward,
            mini_batch,
            size=settings.micro_batch_size,
            dynamic_batching=settings.dynamic_batching,
            group=self.group,
        )
        by_line = metrics.computed_by(sp.size)
        counted = metrics if passes.is_whole else by_line
        for micro_batch in passes.micro_batches(mini_batch):
            if sp.size > 1:
                by_line.add_ratio(f"perf/sp_whole_rows_{settings.role}", passes.is_whole)
            loss = micro_batch_loss(micro_batch.to(self.forward.device), denominators, counted)
            # FSDP averages gradients over all ranks; the gradient of the loss is the sum of theirs, of the
            # shares of other rows and, where a line is divided, of the tokens of the same rows.
            (loss * self.world_size).backward()

    def _step(self) -> float:
        """Clip the gradients and step unless they are not finite; returns their norm before clipping."""
        norm = clip_grad_norm(self.forward.model, self.settings.max_grad_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            logger.warning(
                "update skipped, the gradient is not finite: role=%s grad_norm=%s", self.settings.role, norm
            )
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _global_denominators(self, mini_batches: list[DataProto]) -> list[LossDenominators]:
        """Tokens and sequences of each mini batch over all ranks."""
        masks = [part.batch["response_mask"] for part in mini_batches]
        counts = torch.stack([torch.stack(count_denominators(mask)[:2]) for mask in masks])  # (mini, 2)
        counts = counts.to(self.forward.device)
        dist.all_reduce(counts, group=self.group)
        longest = float(self.settings.max_response_length)
        return [LossDenominators(tokens, sequences, longest) for tokens, sequences in counts]

    def _update_metrics(self, norms: list[float], learning_rate: float) -> dict[str, float]:
        """Metrics that are equal on all ranks already; the gradient norm is the mean over steps taken."""
        role, taken = self.settings.role, [norm for norm in norms if math.isfinite(norm)]
        return {
            f"{role}/grad_norm": sum(taken) / len(taken) if taken else math.nan,
            f"{role}/skipped_updates": float(len(norms) - len(taken)),
            f"{role}/lr": learning_rate,
        }


class MetricSums:
    """Sums and counts of an update's metrics, on the device until the end; no mean of means."""

    def __init__(self, device: torch.device | str) -> None:
        self._losses: dict[str, Tensor] = {}  # shares of losses, summed
        self._tokens: dict[str, Tensor] = {}  # sums over response tokens
        self._num_tokens: dict[str, Tensor] = {}
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._ranks = 1

    def computed_by(self, ranks: int) -> "MetricSums":
        """The same sums, for values that several ranks of a line compute alike and add each."""
        sums = copy.copy(self)
        sums._ranks = ranks
        return sums

    def add_loss(self, name: str, share: Tensor) -> None:
        """Add a micro batch's share of the loss of its mini batch."""
        self._losses[name] = self._losses.get(name, self._zero) + share.detach() / self._ranks

    def add_tokens(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add values of response tokens, or of sequences: any shape, with its mask."""
        self._add_mean(name, masked_sum(values.detach().double(), mask), mask.sum())

    def add_ratio(self, name: str, is_so: bool) -> None:
        """Add one of the things of which a share is so."""
        self._add_mean(name, self._zero + is_so, self._zero + 1)

    def _add_mean(self, name: str, total: Tensor, count: Tensor) -> None:
        self._tokens[name] = self._tokens.get(name, self._zero) + total / self._ranks
        self._num_tokens[name] = self._num_tokens.get(name, self._zero) + count / self._ranks

    def reduce(
        self, group: dist.ProcessGroup | None, num_updates: int, line: dist.ProcessGroup | None = None
    ) -> dict[str, float]:
        """Sum over the ranks and return means: losses over updates, the rest over what was counted.

        Args:
            group: The data-parallel ranks; None for all.
            num_updates: Mini batches.
            line: The ranks that share the same rows, if there are several.
        """
        tables = (self._losses, self._tokens, self._num_tokens)
        sums = torch.stack([value for table in tables for value in table.values()])
        dist.all_reduce(sums, group=group)
        if line is not None:
            dist.all_reduce(sums, group=line)
        totals = iter(sums.tolist())
        losses, tokens, counts = ({name: next(totals) for name in table} for table in tables)
        means = {name: total / num_updates for name, total in losses.items()}
        return means | {name: total / max(counts[name], 1.0) for name, total in tokens.items()}


def divide(
    forward: PackedForward,
    batch: DataProto,
    *,
    size: int,
    dynamic_batching: bool,
    group: dist.ProcessGroup | None,
) -> MicroBatchSchedule:
    """Divide a batch into micro batches and, under sequence parallelism, among the ranks of a line.

    Every rank must call it: the ranks agree on the number of micro batches, so that some may be empty.
    """
    sp = forward.sp
    counts = RowCounts.of(batch, forward.shares_prompts, forward.media_tokens(batch) if sp.size > 1 else None)
    width = batch.batch["attention_mask"].shape[-1]
    response_width = batch.batch["response_mask"].shape[-1] if "response_mask" in batch.batch else 0
    limits = StrategyLimits.of(
        counts,
        size=size,
        dynamic_batching=dynamic_batching,
        prompt_width=width - response_width,
        response_width=response_width,
        ranks=sp.size,
    )
    return MicroBatchSchedule(forward.division.plan(counts, limits), sp, group)


@torch.no_grad()
def forward_in_micro_batches(
    forward: PackedForward,
    batch: DataProto,
    function: Callable[[DataProto], Tensor],
    *,
    size: int,
    dynamic_batching: bool,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Run a function of micro batches over a batch in evaluation mode, and join its results.

    Every rank must call it: the ranks agree on the number of micro batches.

    Args:
        forward: The model that the function runs.
        batch: This rank's sequences.
        function: From a micro batch of b rows to a tensor (b, ...).
        size: Sequences in a micro batch, or the measure of its tokens with `dynamic_batching`.
        dynamic_batching: Fill micro batches by tokens.
        group: The data-parallel ranks.

    Returns:
        (B, ...) on CPU, in the order of the batch.
    """
    forward.model.eval()
    passes = divide(forward, batch, size=size, dynamic_batching=dynamic_batching, group=group)
    results = [function(micro_batch).cpu() for micro_batch in passes.micro_batches(batch)]
    return passes.joined(results, forward.device)
