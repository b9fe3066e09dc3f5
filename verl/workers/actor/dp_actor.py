# SPDX-License-Identifier: Apache-2.0
"""The policy's log-probs and its update, on one data-parallel rank.

The loss of a mini batch is one number, whatever the ranks and micro batches it is computed on: each micro
batch contributes its share, divided by the tokens or sequences of the whole mini batch
(`algorithms/aggregation.py`), and shares and gradients are summed. The reference policy uses the same class
without an optimizer.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import LossDenominators, aggregate_loss, count_denominators
from verl.algorithms.kl import kl_divergence
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.protocol import DataProto
from verl.utils.fsdp_utils import clip_grad_norm
from verl.utils.masking import masked_sum
from verl.utils.rank_logger import get_logger
from verl.workers.config import ActorConfig
from verl.workers.forward import PackedForward
from verl.workers.micro_batches import dynamic_token_budget, restore_order, split_micro_batches

logger = get_logger(__name__)

FORWARD_KEYS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
UPDATE_KEYS = [*FORWARD_KEYS, "old_log_probs", "advantages"]
OBJECT_KEYS = ["uid", "multi_modal_data"]


class KLLoss(NamedTuple):
    """The term of the loss that keeps the policy near the reference: its estimator and its weight."""

    kind: str  # a name in KL_ESTIMATORS
    coef: float  # 0 logs the KL without using it


class DataParallelPPOActor:
    """Computes log-probs of sequences and, with an optimizer, updates the policy by PPO.

    Example::

        actor = DataParallelPPOActor(config.actor, forward, group, rollout_n=5, optimizer=..., scheduler=...)
        old_log_probs = actor.compute_log_probs(batch, temperature=1.0)  # (B, R)
        metrics = actor.update(batch, temperature=1.0)
    """

    def __init__(
        self,
        config: ActorConfig,
        forward: PackedForward,
        group: dist.ProcessGroup | None,
        *,
        rollout_n: int = 1,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        kl_loss: KLLoss | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            config: `worker.actor`, also for the reference.
            forward: The sharded model behind the packed forward pass.
            group: The data-parallel ranks, None for all; FSDP averages gradients over exactly these.
            rollout_n: Responses to each prompt: `global_batch_size` counts prompts.
            optimizer: None for a policy that is never updated.
            scheduler: Of the optimizer's learning rate; stepped once for each training step.
            kl_loss: None leaves the reference out of the loss; the batch then needs no `ref_log_probs`.
        """
        self.config = config
        self.forward = forward
        self.group = group
        self.dp_size = dist.get_world_size(group)
        self.mini_batch_rows = config.global_batch_size * rollout_n // self.dp_size
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.kl_loss = kl_loss
        self.policy_loss = POLICY_LOSSES[config.loss_type]

    @torch.no_grad()
    def compute_log_probs(self, batch: DataProto, temperature: float) -> Tensor:
        """Log-probs of the response tokens under the present weights, (B, R) float32 on CPU, zero on padding.

        Every rank must call it: the ranks agree on the number of micro batches.

        Args:
            batch: This rank's sequences.
            temperature: Logits are divided by it, as they were for sampling.
        """
        self.forward.model.eval()
        batch = batch.select(FORWARD_KEYS, OBJECT_KEYS)
        parts = self._micro_batches(batch, self.config.micro_batch_size_per_device_for_experience)
        results = [self.forward.log_probs(batch[rows], temperature).log_probs.cpu() for rows in parts]
        return restore_order(results, parts)

    def update(self, batch: DataProto, temperature: float) -> dict[str, float]:
        """Update the policy: an optimizer step for each mini batch and PPO epoch, then one of the scheduler.

        The rows come in the order of the mini batches, this rank's share of each next to each other. A mini
        batch whose gradient is not finite changes nothing but `actor/skipped_updates`; the scheduler counts
        training steps and moves on all the same. Every rank must call it.

        Args:
            batch: This rank's sequences, with advantages, old and (for a KL loss) reference log-probs.
            temperature: Logits are divided by it, as they were for `old_log_probs`.

        Returns:
            Metrics over all ranks, the same on each. Losses are means over mini batches of the loss that was
            minimised; the rest are means over the response tokens of the step.

        Raises:
            ValueError: The rows do not divide into mini batches.
        """
        optimizer, scheduler = self.optimizer, self.scheduler
        assert optimizer is not None and scheduler is not None, "the reference is never updated"
        if not self.mini_batch_rows or len(batch) % self.mini_batch_rows:
            raise ValueError(
                f"`worker.actor.global_batch_size` ({self.config.global_batch_size} prompts,"
                f" {self.mini_batch_rows} sequences on each of {self.dp_size} ranks) must divide the"
                f" {len(batch)} sequences of a rank"
            )
        self.forward.model.train()
        reference = ["ref_log_probs"] if self.kl_loss else []
        mini_batches = batch.select(UPDATE_KEYS + reference, OBJECT_KEYS).split(self.mini_batch_rows)
        denominators = self._global_denominators(mini_batches)
        metrics = MetricSums(self.forward.device)
        norms = []
        for _ in range(self.config.ppo_epochs):
            for mini_batch, counts in zip(mini_batches, denominators, strict=True):
                self._accumulate_gradients(mini_batch, counts, temperature, metrics)
                norms.append(self._step(optimizer))
        learning_rate = float(scheduler.get_last_lr()[0])
        scheduler.step()
        return metrics.reduce(self.group, len(norms)) | self._update_metrics(norms, learning_rate)

    def _accumulate_gradients(
        self, mini_batch: DataProto, denominators: LossDenominators, temperature: float, metrics: "MetricSums"
    ) -> None:
        """Run forward and backward on each micro batch; the gradients add up in the parameters.

        Gradients are reduced over ranks after every micro batch: keeping them until the last one would hold
        an unsharded gradient of the whole model on every device.
        """
        for rows in self._micro_batches(mini_batch, self.config.micro_batch_size_per_device_for_update):
            micro_batch = mini_batch[rows].to(self.forward.device)
            loss = self._loss_share(micro_batch, denominators, temperature, metrics)
            # FSDP averages gradients over the ranks, the loss is the sum of their shares.
            (loss * self.dp_size).backward()

    def _loss_share(
        self,
        micro_batch: DataProto,
        denominators: LossDenominators,
        temperature: float,
        metrics: "MetricSums",
    ) -> Tensor:
        """Return the share of a micro batch in the loss of its mini batch.

        loss = pg_loss - entropy_coef * entropy + kl_coef * kl_loss
        """
        config, tensors = self.config, micro_batch.batch
        mask = tensors["response_mask"]  # (B, R)

        def share(per_token: Tensor) -> Tensor:
            return aggregate_loss(per_token, mask, config.loss_avg_mode, denominators)

        log_probs, entropy = self.forward.log_probs(micro_batch, temperature, with_entropy=True)  # (B, R)
        assert entropy is not None, "it was asked for"
        policy = self.policy_loss(
            PolicyLossInputs(
                log_probs=log_probs,
                old_log_probs=tensors["old_log_probs"],
                advantages=tensors["advantages"],
                response_mask=mask,
                clip_ratio_low=config.clip_ratio_low,
                clip_ratio_high=config.clip_ratio_high,
                clip_ratio_dual=config.clip_ratio_dual,
            )
        )
        loss = share(policy.per_token)
        metrics.add_loss("actor/pg_loss", loss)
        for name, values in policy.statistics.items():
            metrics.add_tokens(f"actor/{name}", values, mask)
        metrics.add_tokens("actor/entropy", entropy, mask)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * share(entropy)
        if self.kl_loss:
            kl = share(kl_divergence(log_probs, tensors["ref_log_probs"], mask, self.kl_loss.kind))
            metrics.add_loss("actor/kl_loss", kl)
            if self.kl_loss.coef:
                loss = loss + self.kl_loss.coef * kl
        return loss

    def _step(self, optimizer: Optimizer) -> float:
        """Clip the gradients and step unless they are not finite; returns their norm before clipping."""
        norm = clip_grad_norm(self.forward.model, self.config.max_grad_norm)
        if math.isfinite(norm):
            optimizer.step()
        else:
            logger.warning("update skipped, the gradient is not finite: grad_norm=%s", norm)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _micro_batches(self, batch: DataProto, size: int) -> list[list[int]]:
        """Rows of each micro batch: equally many on every rank, so that some may be empty."""
        budget = dynamic_token_budget(batch, size) if self.config.dynamic_batching else None
        return split_micro_batches(batch, size, budget, self.group)

    def _global_denominators(self, mini_batches: list[DataProto]) -> list[LossDenominators]:
        """Tokens and sequences of each mini batch over all ranks."""
        masks = [part.batch["response_mask"] for part in mini_batches]
        counts = torch.stack([torch.stack(count_denominators(mask)) for mask in masks])  # (mini batches, 2)
        counts = counts.to(self.forward.device)
        dist.all_reduce(counts, group=self.group)
        return [LossDenominators(*row.unbind()) for row in counts]

    def _update_metrics(self, norms: list[float], learning_rate: float) -> dict[str, float]:
        """Metrics that are equal on all ranks already; the gradient norm is the mean over steps taken."""
        taken = [norm for norm in norms if math.isfinite(norm)]
        metrics = {
            "actor/grad_norm": sum(taken) / len(taken) if taken else math.nan,
            "actor/skipped_updates": float(len(norms) - len(taken)),
            "actor/lr": learning_rate,
        }
        return metrics | ({"actor/kl_coef": self.kl_loss.coef} if self.kl_loss else {})


class MetricSums:
    """Sums and counts of an update's metrics, on the device until the end; no mean of means."""

    def __init__(self, device: torch.device | str) -> None:
        self._losses: dict[str, Tensor] = {}  # shares of losses, summed
        self._tokens: dict[str, Tensor] = {}  # sums over response tokens
        self._num_tokens: dict[str, Tensor] = {}
        self._zero = torch.zeros((), dtype=torch.float64, device=device)

    def add_loss(self, name: str, share: Tensor) -> None:
        """Add a micro batch's share of the loss of its mini batch."""
        self._losses[name] = self._losses.get(name, self._zero) + share.detach()

    def add_tokens(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add values of response tokens, (B, R) each."""
        self._tokens[name] = self._tokens.get(name, self._zero) + masked_sum(values.detach().double(), mask)
        self._num_tokens[name] = self._num_tokens.get(name, self._zero) + mask.sum()

    def reduce(self, group: dist.ProcessGroup | None, num_updates: int) -> dict[str, float]:
        """Sum over the ranks and return means: losses over updates, the rest over response tokens.

        `actor/entropy` also stands under EasyR1's name for it, `actor/entropy_loss`.
        """
        tables = (self._losses, self._tokens, self._num_tokens)
        sums = torch.stack([value for table in tables for value in table.values()])
        dist.all_reduce(sums, group=group)
        totals = iter(sums.tolist())
        losses, tokens, counts = ({name: next(totals) for name in table} for table in tables)
        means = {name: total / num_updates for name, total in losses.items()}
        means |= {name: total / max(counts[name], 1.0) for name, total in tokens.items()}
        return means | {"actor/entropy_loss": means["actor/entropy"]}
