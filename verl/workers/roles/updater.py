# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps over mini batches, for every model that is trained.

The loss of a mini batch does not depend on its division over ranks and micro batches: each micro batch
computes its share, divided by the tokens or sequences of the whole mini batch (`algorithms/aggregation.py`),
and gradients are summed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import LossDenominators, count_denominators
from verl.algorithms.token_selection import SelectionInputs, TokenSelection
from verl.config.model import TrainedModelConfig, as_number
from verl.config.worker import ActorConfig
from verl.distributed.device import to_device
from verl.distributed.fsdp import check_sums, clip_grad_norm, sum_over_copies
from verl.protocol import DataProto
from verl.utils.rank_logger import get_logger
from verl.workers.packing.row_forward import RowForward
from verl.workers.packing.schedule import MicroBatchSchedule, Results, run_in_micro_batches
from verl.workers.roles.metric_sums import MetricSums
from verl.workers.roles.routers import CHOICES, RouterBalance

logger = get_logger(__name__)


@dataclass(frozen=True)
class Training:
    """Optimizer and sizes of a model that is updated."""

    optimizer: Optimizer
    scheduler: LRScheduler  # stepped once per training step
    rollout_n: int = 1  # responses to each prompt; `global_batch_size` counts prompts
    max_response_length: int = 1  # in tokens: the scale of `seq_sum_norm`


class MicroBatch(NamedTuple):
    """Rows that run through the model at once."""

    rows: DataProto  # on CPU, where they are packed
    tensors: dict[str, Tensor]  # the rows' tensors that only losses read, and `loss_mask`, on the device


@dataclass(frozen=True)
class MiniBatch:
    """This rank's rows of one optimizer step."""

    batch: DataProto
    masks: Mapping[str, LossDenominators]  # tokens and sequences of masks' columns, over all ranks
    metrics: MetricSums
    forward: RowForward
    schedule: MicroBatchSchedule
    reduces_once: bool  # see `FSDPConfig`
    computed: list[Tensor] = field(default_factory=list)  # log-probs of each micro batch, (b, R)

    @property
    def denominators(self) -> LossDenominators:
        return self.masks["loss_mask"]

    def log_probs(self) -> Tensor:
        """Return the log-probs that the update computed: (B, R) on CPU; collective."""
        return self.schedule.join(self.computed, self.forward.device)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield micro batches in order; each needs its backward pass before the next one."""
        self.forward.model.train()
        inputs = set(self.forward.keys) - {"loss_mask"}  # reach the device with the model's inputs
        for number, whole in enumerate(self.schedule.micro_batches(self.batch), 1):
            parts = self.forward.parts(whole)
            for rows in parts:
                if self.reduces_once:
                    is_last = number == len(self.schedule) and rows is parts[-1]
                    sum_over_copies(self.forward.model, now=is_last)
                tensors = {key: value for key, value in rows.batch.items() if key not in inputs}
                yield MicroBatch(rows, to_device(tensors, self.forward.device))


def compute_log_probs(
    config: TrainedModelConfig, forward: RowForward, batch: DataProto, temperature: float
) -> Tensor:
    """Compute the log-probs of the response tokens: (B, R) float32 on CPU; collective over all ranks."""
    return compute_experience(
        config, forward, batch, lambda micro: forward.log_probs(micro, temperature).log_probs
    )


def compute_experience(
    config: TrainedModelConfig,
    forward: RowForward,
    batch: DataProto,
    function: Callable[[DataProto], Results],
    further_keys: Sequence[str] = (),  # that `function` reads if they are there
) -> Results:
    """`run_in_micro_batches` with the sizes of a role; `function` reads what a `RowForward` reads."""
    further = [key for key in further_keys if key in batch.batch]
    objects = [key for key in further_keys if key in batch.non_tensor_batch]
    return run_in_micro_batches(
        forward,
        batch.select([*forward.keys, *further], [*forward.object_keys, *objects]),
        function,
        size=as_number(config.micro_batch_size_per_device_for_experience),
        dynamic_batching=config.dynamic_batching,
    )


class Updater:
    """Runs the optimizer of one sharded model; every rank makes the same calls.

    Example::

        metrics = updater.run(batch, loss)  # {"actor/pg_loss": ..., "actor/grad_norm": ...}
    """

    def __init__(
        self,
        role: str,  # prefix of its metrics and section of its options
        config: TrainedModelConfig,  # that section
        forward: RowForward,
        training: Training,
        ppo_epochs: int = 1,
    ) -> None:
        self.role, self.config, self.forward, self.group = role, config, forward, forward.sp.dp_group
        self.optimizer, self.scheduler = training.optimizer, training.scheduler
        self.ppo_epochs = ppo_epochs
        self.max_response_length = float(training.max_response_length)
        self.dp_size = dist.get_world_size(self.group)
        self.reduces_once = config.fsdp.reduces_once(dist.get_world_size())
        self.mini_batch_rows = config.global_batch_size * training.rollout_n // self.dp_size
        self.metrics = MetricSums(forward.device)
        self.grad_norms: list[float] = []
        self.balance = RouterBalance(
            role, forward, config.model.router_aux_loss_coef, config.fsdp.expert_parallel_size
        )

    def run(self, batch: DataProto, loss: Callable[[MicroBatch, MiniBatch], Tensor]) -> dict[str, float]:
        """Take a step for each mini batch of each PPO epoch, and return the metrics of `finish`."""
        for mini_batch in self.mini_batches(batch):
            for micro_batch in mini_batch.micro_batches():
                self.backward(loss(micro_batch, mini_batch))
            self.step()
        return self.finish()

    def mini_batches(self, batch: DataProto, masks: Iterable[str] = ()) -> Iterator[MiniBatch]:
        """Yield the mini batches of an update in order, once for each PPO epoch.

        Args:
            masks: Columns of masks besides `loss_mask` that losses are averaged over.
        """
        self._check_rows(len(batch))
        self.metrics, self.grad_norms = MetricSums(self.forward.device), []
        parts = self._with_choices(batch).split(self.mini_batch_rows)
        columns = dict.fromkeys(["loss_mask", *masks])
        denominators = [self._global_denominators(parts, column) for column in columns]
        choices = self.balance.total(parts) if CHOICES in parts[0].batch else [None] * len(parts)
        for _ in range(self.ppo_epochs):
            for part, chosen, *counts in zip(parts, choices, *denominators, strict=True):
                self.balance.choices = chosen
                yield self._mini_batch(part, dict(zip(columns, counts, strict=True)))

    def _with_choices(self, batch: DataProto) -> DataProto:
        # the experts that rows choose before the first step, where one micro batch cannot tell
        if not self.balance.coef or CHOICES in batch.batch:
            return batch
        if len(batch) == self.mini_batch_rows and self.ppo_epochs == 1 and len(self._schedule(batch)) == 1:
            return batch
        return batch.merge(compute_experience(self.config, self.forward, batch, self.balance.count_choices))

    def backward(self, loss: Tensor) -> None:
        # Gradients are scattered over the ranks of a copy every time: keeping them until the last micro batch
        # would hold an unsharded gradient of the whole model on every device.
        # FSDP averages gradients over all ranks, but the loss is the sum of their losses: of other rows and,
        # where a sequence is sharded, of other tokens of the same rows; not of the same tokens.
        loss = self.balance.add_to(loss, self.metrics)
        (loss * self.dp_size * self.forward.sp.size).backward()

    def step(self) -> None:
        """Clip the gradients and take an optimizer step, or skip it if they are not finite."""
        if self.reduces_once:
            check_sums(self.forward.model)
        norm = clip_grad_norm(self.forward.model, self.config.max_grad_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            logger.warning(
                "update skipped, the gradient is not finite: role=%s grad_norm=%s", self.role, norm
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.grad_norms.append(norm)

    def finish(self) -> dict[str, float]:
        """Step the scheduler, after skipped updates too, and return the metrics, equal on all ranks.

        Losses are means over mini batches, other metrics over the response tokens of the training step.
        `<role>/grad_norm` is the mean before clipping over the steps taken.
        """
        learning_rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        taken = [norm for norm in self.grad_norms if math.isfinite(norm)]
        means = self.metrics.reduce(self.group, len(self.grad_norms), sp_group=self.forward.sp.group)
        return means | {
            f"{self.role}/grad_norm": sum(taken) / len(taken) if taken else math.nan,
            f"{self.role}/skipped_updates": float(len(self.grad_norms) - len(taken)),
            f"{self.role}/lr": learning_rate,
        }

    def _check_rows(self, rows: int) -> None:
        if not self.mini_batch_rows or rows % self.mini_batch_rows:
            raise ValueError(
                f"`worker.{self.role}.global_batch_size` ({self.config.global_batch_size} prompts,"
                f" {self.mini_batch_rows} sequences on each of {self.dp_size} ranks) must divide the"
                f" {rows} sequences of a rank"
            )

    def _global_denominators(self, parts: list[DataProto], mask: str) -> list[LossDenominators]:
        tensors = [part.batch for part in parts]
        counts = [count_denominators(each[mask], each.get("sequence_weights")) for each in tensors]
        counts = torch.stack([torch.stack(each[:2]) for each in counts])  # (parts, 2)
        counts = counts.to(self.forward.device)
        dist.all_reduce(counts, group=self.group)
        return [LossDenominators(tokens, sequences, self.max_response_length) for tokens, sequences in counts]

    def _schedule(self, part: DataProto) -> MicroBatchSchedule:
        return MicroBatchSchedule(
            self.forward,
            part,
            size=as_number(self.config.micro_batch_size_per_device_for_update),
            dynamic_batching=self.config.dynamic_batching,
        )

    def _mini_batch(self, part: DataProto, masks: Mapping[str, LossDenominators]) -> MiniBatch:
        forward, schedule = self.forward, self._schedule(part)
        shared = self.metrics.shared_by(forward.sp.size)
        if forward.sp.size > 1:
            each = torch.ones(len(schedule), device=forward.device)
            shared.add_mean(f"perf/sp_whole_rows_{self.role}", each * schedule.is_whole, each)
        metrics = self.metrics if schedule.is_whole else shared
        return MiniBatch(part, masks, metrics, forward, schedule, self.reduces_once)


class MiniBatchSelection:
    """Selects tokens of mini batches for one model, which its loss treats differently.

    A choice among all tokens of a mini batch (by covariance, `algorithms/token_selection.py`) would depend on
    the micro batches if each made its own. So the log-probs of the whole mini batch are computed first, under
    the weights before its update, and gathered; every rank makes the same choice and keeps its own rows. It
    costs one more forward pass.
    """

    def __init__(self, config: ActorConfig, forward: RowForward, choose: TokenSelection) -> None:
        self.config, self.forward, self.choose = config, forward, choose
        self.ratio = config.kl_cov_ratio if config.loss_type == "kl_cov" else config.clip_cov_ratio

    def add_to(self, mini_batch: DataProto, temperature: float, seed: int) -> DataProto:
        """Add `selected` (B, R) bool; collective over all ranks."""
        tensors = mini_batch.batch
        keep = tensors["loss_mask"].bool()  # (B, R)
        log_probs = compute_log_probs(self.config, self.forward, mini_batch, temperature)
        columns = torch.arange(keep.shape[1]).expand_as(keep)
        row_ids = tensors["row_ids"][:, None].expand_as(keep)
        values = torch.stack([log_probs, tensors["old_log_probs"], tensors["advantages"]])[:, keep]  # (3, n)
        token_ids = torch.stack([row_ids, columns])[:, keep]  # (2, n)
        all_values, own = self._gather(values)
        all_token_ids, _ = self._gather(token_ids)
        chosen = self.choose(
            SelectionInputs(
                *all_values.unbind(),
                *all_token_ids.unbind(),
                seed=seed,
                clip_ratio_low=self.config.clip_ratio_low,
                clip_ratio_high=self.config.clip_ratio_high,
                ratio=self.ratio,
                lower=self.config.clip_cov_lb,
                upper=self.config.clip_cov_ub,
            )
        )
        selected = torch.zeros_like(keep).masked_scatter(keep, chosen[own])
        return mini_batch.merge({"selected": selected})

    def _gather(self, columns: Tensor) -> tuple[Tensor, slice]:
        """Gather (k, n) of every rank as (k, N), n its own; also return the slice of this rank's columns."""
        group = self.forward.sp.dp_group
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, columns, group=group)
        start = sum(part.shape[1] for part in gathered[: dist.get_rank(group)])
        return torch.cat(gathered, dim=1), slice(start, start + columns.shape[1])
