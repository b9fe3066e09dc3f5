# SPDX-License-Identifier: Apache-2.0
"""The policy's log-probs and its loss, on one data-parallel rank.

How the loss is cut over micro batches and ranks is the `Updater`'s; here stands what it is. The reference
policy uses the same class without an optimizer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import LossDenominators, aggregate_loss
from verl.algorithms.kl import FULL, kl_divergence
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs, weighted
from verl.algorithms.rollout_correction import RolloutCorrection, importance_weights, rejection_mask
from verl.algorithms.token_selection import TOKEN_SELECTIONS
from verl.config.model import as_number
from verl.config.worker import ActorConfig
from verl.models.fused_log_probs import TokenLogProbs
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.token_selection import MiniBatchSelection
from verl.workers.roles.updater import (
    FORWARD_KEYS,
    OBJECT_KEYS,
    MetricSums,
    Updater,
    UpdateSettings,
    forward_in_micro_batches,
)

UPDATE_KEYS = [*FORWARD_KEYS, "old_log_probs", "advantages"]
OPTIONAL_KEYS = ["row_ids", "ref_log_probs", "rollout_is_weights"]
REINFORCE = "gpg"  # the loss without a ratio


class KLLoss(NamedTuple):
    """The term of the loss that keeps the policy near the reference: its estimator and its weight."""

    kind: str  # a name in KL_ESTIMATORS, or "full"
    coef: float  # 0 logs the KL without using it


@dataclass(frozen=True)
class ActorTraining:
    """What a policy needs to be updated."""

    optimizer: Optimizer
    scheduler: LRScheduler  # of the optimizer's learning rate; stepped once for each training step
    rollout_n: int = 1  # responses to each prompt: `global_batch_size` counts prompts
    max_response_length: int = 1  # tokens: the scale of `seq_sum_norm`
    kl_loss: KLLoss | None = None  # None leaves the reference out of the loss
    reference: PackedForward | None = None  # run beside the policy for the KL over the vocabulary only
    bypass_correction: RolloutCorrection | None = None  # of the difference to `old_log_probs`, in the loss
    is_reinforce: bool = False  # REINFORCE instead of `loss_type`


class DataParallelPPOActor:
    """Computes log-probs of sequences and, with `training`, updates the policy.

    Example::

        actor = DataParallelPPOActor(config.actor, forward, group, ActorTraining(optimizer, scheduler))
        old_log_probs = actor.compute_log_probs(batch, temperature=1.0).log_probs  # (B, R)
        metrics = actor.update(batch, temperature=1.0)
    """

    def __init__(
        self,
        config: ActorConfig,
        forward: PackedForward,
        group: dist.ProcessGroup | None,
        training: ActorTraining | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            config: `worker.actor`, also for the reference.
            forward: The sharded model behind the packed forward pass.
            group: The data-parallel ranks, None for all.
            training: None for a policy that is never updated.
        """
        self.config = config
        self.forward = forward
        self.group = group
        self.training = training
        self.selection = None
        self.full_kl_reference = None
        if training is not None:
            if training.kl_loss is not None and training.kl_loss.kind == FULL:
                self.full_kl_reference = training.reference
            loss_type = REINFORCE if training.is_reinforce else config.loss_type
            self.policy_loss = POLICY_LOSSES[loss_type]
            settings = UpdateSettings.of(
                "actor",
                config,
                rollout_n=training.rollout_n,
                max_response_length=training.max_response_length,
                ppo_epochs=config.ppo_epochs,
            )
            self.updater = Updater(forward, group, settings, training.optimizer, training.scheduler)
            if loss_type in TOKEN_SELECTIONS:
                self.selection = MiniBatchSelection(config, forward, group)

    @property
    def reads_reference(self) -> bool:
        """Whether an update runs the reference beside the policy."""
        return self.full_kl_reference is not None

    @torch.no_grad()
    def compute_log_probs(
        self,
        batch: DataProto,
        temperature: float,
        *,
        with_sum_squares: bool = False,
        reference: PackedForward | None = None,
    ) -> TokenLogProbs:
        """Log-probs of the response tokens under the present weights.

        Every rank must call it: the ranks agree on the number of micro batches.

        Args:
            batch: This rank's sequences.
            temperature: Logits are divided by it, as they were for sampling.
            with_sum_squares: Also the sum of the squares of all probabilities at each token.
            reference: Also the KL divergence from this model, over the whole vocabulary.

        Returns:
            (B, R) float32 on CPU each, zero on padding; without entropy.
        """

        def stacked(micro_batch: DataProto) -> Tensor:
            found = self.forward.log_probs(
                micro_batch, temperature, with_sum_squares=with_sum_squares, reference=reference
            )
            return torch.stack([value for value in found if value is not None], dim=-1)  # (b, R, values)

        config = self.config
        result = forward_in_micro_batches(
            self.forward,
            batch.select(FORWARD_KEYS, OBJECT_KEYS),
            stacked,
            size=as_number(config.micro_batch_size_per_device_for_experience),
            dynamic_batching=config.dynamic_batching,
            group=self.group,
        )
        values = iter(result.unbind(-1))
        return TokenLogProbs(
            next(values),
            sum_squared_probs=next(values) if with_sum_squares else None,
            kl=next(values) if reference is not None else None,
        )

    def update(
        self, batch: DataProto, temperature: float, *, entropy_coef: float | None = None, seed: int = 0
    ) -> dict[str, float]:
        """Update the policy: an optimizer step for each mini batch and PPO epoch; see `Updater.run`.

        Args:
            batch: This rank's sequences, with advantages, old and (for a KL loss) reference log-probs, and
                `rollout_is_weights` if the loss is weighted.
            temperature: Logits are divided by it, as they were for `old_log_probs`.
            entropy_coef: Weight of the entropy bonus; None is the option's.
            seed: Of the random choice of losses that make one; another in every step.

        Returns:
            Metrics over all ranks, the same on each.

        Raises:
            ValueError: The rows do not divide into mini batches.
        """
        training = self.training
        assert training is not None, "the reference is never updated"
        keys = UPDATE_KEYS + [key for key in OPTIONAL_KEYS if key in batch.batch]
        coef = self.config.entropy_coef if entropy_coef is None else entropy_coef

        def micro_batch_loss(micro: DataProto, denominators: LossDenominators, metrics: MetricSums) -> Tensor:
            return self._micro_batch_loss(micro, denominators, metrics, training, temperature, coef)

        prepare = None if self.selection is None else self.selection.prepare(temperature, seed)
        metrics = self.updater.run(batch.select(keys, OBJECT_KEYS), micro_batch_loss, prepare)
        metrics |= {"actor/entropy_loss": metrics["actor/entropy"], "actor/entropy_coef": coef}
        return metrics | ({"actor/kl_coef": training.kl_loss.coef} if training.kl_loss else {})

    def _micro_batch_loss(
        self,
        micro_batch: DataProto,
        denominators: LossDenominators,
        metrics: MetricSums,
        training: ActorTraining,
        temperature: float,
        entropy_coef: float,
    ) -> Tensor:
        """Return the share of a micro batch in the loss of its mini batch.

        loss = pg_loss - entropy_coef * entropy + kl_coef * kl_loss
        """
        tensors = micro_batch.batch
        mask = tensors["response_mask"]  # (B, R)

        def share(per_token: Tensor) -> Tensor:
            return aggregate_loss(per_token, mask, self.config.loss_avg_mode, denominators)

        found = self.forward.log_probs(
            micro_batch, temperature, with_entropy=True, reference=self.full_kl_reference
        )
        assert found.entropy is not None, "it was asked for"
        loss = self._policy_loss(found.log_probs, micro_batch, share, metrics)
        metrics.add_tokens("actor/entropy", found.entropy, mask)
        if entropy_coef:
            loss = loss - entropy_coef * share(found.entropy)
        if training.kl_loss:
            kl = share(
                kl_divergence(
                    found.log_probs, tensors.get("ref_log_probs"), mask, training.kl_loss.kind, found.kl
                )
            )
            metrics.add_loss("actor/kl_loss", kl)
            if training.kl_loss.coef:
                loss = loss + training.kl_loss.coef * kl
        return loss

    def _policy_loss(
        self,
        log_probs: Tensor,
        micro_batch: DataProto,
        share: Callable[[Tensor], Tensor],
        metrics: MetricSums,
    ) -> Tensor:
        """The policy loss alone, weighted if the batch or the run says so."""
        config, tensors = self.config, micro_batch.batch
        mask, old = tensors["response_mask"], tensors["old_log_probs"]
        policy = self.policy_loss(
            PolicyLossInputs(
                log_probs=log_probs,
                old_log_probs=old,
                advantages=tensors["advantages"],
                response_mask=mask,
                clip_ratio_low=config.clip_ratio_low,
                clip_ratio_high=config.clip_ratio_high,
                clip_ratio_dual=config.clip_ratio_dual,
                tau_positive=config.tau_positive,
                tau_negative=config.tau_negative,
                ppo_kl_coef=config.ppo_kl_coef,
                dro_beta=config.dro_beta,
                sppo_eta=config.sppo_eta,
                selected=tensors.get("selected"),
            )
        )
        weights = tensors.get("rollout_is_weights")
        if self.training is not None and self.training.bypass_correction is not None:
            spec = self.training.bypass_correction
            present = log_probs.detach()
            weights = importance_weights(present, old, mask, spec) * rejection_mask(present, old, mask, spec)
        loss = share(weighted(policy, weights, mask).per_token)
        metrics.add_loss("actor/pg_loss", loss)
        for name, values in policy.statistics.items():
            metrics.add_tokens(f"actor/{name}", values, mask)
        return loss
