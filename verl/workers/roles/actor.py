# SPDX-License-Identifier: Apache-2.0
"""Log-probs and loss of the policy, on one data-parallel rank; the reference uses the same class."""

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.aggregation import aggregate_loss
from verl.algorithms.kl import FULL, KLLoss, kl_divergence
from verl.algorithms.policy_loss_types import PolicyLossOptions
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, weighted
from verl.algorithms.rollout_correction import RolloutCorrection, importance_weights, rejection_mask
from verl.algorithms.token_selection import selection_of
from verl.batch_keys import OLD_ROUTES, ROUTE_MATCHES, TEACHER_KEYS, TEACHER_MEDIA
from verl.config.worker import ActorConfig
from verl.models.fused_log_probs import TokenLogProbs
from verl.protocol import DataProto
from verl.workers.packing.row_forward import RowForward
from verl.workers.packing.row_routes import column_of, pad_routes
from verl.workers.roles.router_balance import CHOICES
from verl.workers.roles.router_replay import RouterReplay
from verl.workers.roles.token_selection import MiniBatchSelection
from verl.workers.roles.updater import MicroBatch, MiniBatch, Training, Updater, compute_columns

if TYPE_CHECKING:  # a policy without teachers needs none of it
    from verl.workers.roles.teachers import Teachers

OPTIONAL_KEYS = [
    "old_log_probs",
    "row_ids",
    "ref_log_probs",
    "sequence_weights",
    "rollout_is_weights",
    "rollout_log_probs",
    CHOICES,
    ROUTE_MATCHES,
    *TEACHER_KEYS,
]
REINFORCE = "gpg"  # the loss without a ratio


class DistillationLoss(NamedTuple):
    """The term of the loss that pulls the policy towards its teachers."""

    teachers: "Teachers"
    coef: float


@dataclass(frozen=True)
class ActorTraining(Training):
    """Optimizer and loss options of a policy that is updated."""

    kl_loss: KLLoss | None = None  # None leaves the reference out of the loss
    reference: RowForward | None = None  # read only for the KL over the whole vocabulary
    correction: RolloutCorrection | None = None  # weights computed here, with the update's log-probs
    is_reinforce: bool = False  # REINFORCE instead of `loss_type`
    distillation: DistillationLoss | None = None
    uses_advantages: bool = True  # False leaves the policy loss out


class Updated(NamedTuple):
    """Results of an update on one rank."""

    metrics: dict[str, float]  # equal on all ranks
    columns: DataProto | None  # `old_log_probs` of this rank's rows, if the batch came without


class DataParallelPPOActor:
    """Computes log-probs of sequences and, with `training`, updates the policy.

    Example::

        actor = DataParallelPPOActor(config.actor, forward, group, ActorTraining(optimizer, scheduler))
        old_log_probs = actor.compute_log_probs(batch, temperature=1.0)  # a batch with this column
        metrics, _ = actor.update(batch.merge(old_log_probs), temperature=1.0)
    """

    def __init__(
        self,
        config: ActorConfig,  # for the reference too
        forward: RowForward,
        group: dist.ProcessGroup | None,
        training: ActorTraining | None = None,  # None: never updated
    ) -> None:
        self.config, self.forward, self.group, self.training = config, forward, group, training
        self.selection = None
        self.replay: RouterReplay | None = None  # None: a dense model, or one that is never updated
        self.full_kl_reference = None
        self.distillation = None if training is None else training.distillation
        if training is not None:
            if forward.routing is not None:
                self.replay = RouterReplay(config.router_replay)
            if training.kl_loss is not None and training.kl_loss.kind == FULL:
                self.full_kl_reference = training.reference
            loss_type = REINFORCE if training.is_reinforce else config.loss_type
            self.policy_loss = POLICY_LOSSES[loss_type]
            # the section and the inputs of losses use the same names
            self.loss_options = {
                entry.name: getattr(config, entry.name) for entry in fields(PolicyLossOptions)
            }
            self.updater = Updater("actor", config, forward, group, training, config.ppo_epochs)
            choose = selection_of(loss_type, self.policy_loss)
            if choose is not None:
                self.selection = MiniBatchSelection(config, forward, group, choose)

    @property
    def balances(self) -> bool:
        """True if the update has a router's balance loss."""
        return self.training is not None and self.updater.balance.coef > 0

    @property
    def reads_reference(self) -> bool:
        return self.full_kl_reference is not None

    @property
    def runs_teachers(self) -> bool:
        return self.distillation is not None and self.distillation.teachers.runs_in_update

    @torch.no_grad()
    def compute_log_probs(
        self,
        batch: DataProto,
        temperature: float,
        *,
        column: str = "old_log_probs",
        with_sum_squares: bool = False,
        reference: RowForward | None = None,
    ) -> DataProto:
        """Compute log-probs of the response tokens under the current weights; collective over all ranks.

        See `PackedForward.log_probs` for the arguments.

        Returns:
            The columns of this pass, on CPU: log-probs as `column`, `sum_squared_probs` and `full_kl` if
            requested; of a mixture what its update reads, `expert_choices`, `route_matches`, `old_routes`.
        """
        replay, forward = self.replay, self.forward
        use = None if replay is None else replay.in_old_pass(batch)
        records = replay is not None and replay.records

        def columns(micro_batch: DataProto) -> dict[str, Tensor]:
            with (
                forward.counting_choices() if self.balances else nullcontext([]) as counts,
                forward.observing_routes(use, records=records) as observed,
            ):
                result = forward.log_probs(
                    micro_batch, temperature, with_sum_squares=with_sum_squares, reference=reference
                )
            mask = micro_batch.batch["attention_mask"]
            found = {
                column: result.log_probs,  # (b, R)
                "sum_squared_probs": result.sum_squared_probs,  # (b, R)
                "full_kl": result.kl,  # (b, R)
                CHOICES: next(iter(counts), None),  # (b, E)
                ROUTE_MATCHES: next(iter(observed.matches), None),  # (b, 2)
                OLD_ROUTES: next((pad_routes(each.cpu(), mask) for each in observed.routes), None),
            }
            return {name: values for name, values in found.items() if values is not None}

        found = compute_columns(self.config, forward, self.group, batch, columns)
        routes, objects = found.pop(OLD_ROUTES, None), {}  # (B, T, layers x k)
        if routes is not None:
            objects[OLD_ROUTES] = column_of(routes, batch.batch["attention_mask"], forward.num_routers)
        return DataProto.from_dict(found, objects)

    def update(
        self, batch: DataProto, temperature: float, *, entropy_coef: float | None = None, seed: int = 0
    ) -> Updated:
        """Update the policy: an optimizer step for each mini batch and PPO epoch; collective over all ranks.

        Args:
            batch: This rank's sequences in the order of the mini batches, with `advantages`, for a KL loss
                `ref_log_probs`, for a weighted one `rollout_is_weights`, for `ActorTraining.correction`
                `rollout_log_probs`, and `old_log_probs`. A batch that is one mini batch of one epoch may
                omit these: they equal the log-probs of the update, which are returned.
            temperature: Divides the logits, as for `old_log_probs`.
            entropy_coef: Weight of the entropy bonus; None is the option's.
            seed: For losses that select tokens at random; another in every step.
        """
        assert self.training is not None, "the reference is never updated"
        keys = [*self.forward.keys, "advantages"] + [key for key in OPTIONAL_KEYS if key in batch.batch]
        coef = self.config.entropy_coef if entropy_coef is None else entropy_coef
        updater, columns = self.updater, None
        objects = [key for key in (TEACHER_MEDIA,) if key in batch.non_tensor_batch]
        rows = batch.select(keys, [*self.forward.object_keys, *objects])
        use, agreement = (None, "") if self.replay is None else self.replay.in_update(rows)
        for number, mini_batch in enumerate(updater.mini_batches(rows), 1):
            if self.selection is not None:
                selected = self.selection.add_to(mini_batch.batch, temperature, seed * 1_000_003 + number)
                mini_batch = replace(mini_batch, batch=selected)
            for micro_batch in mini_batch.micro_batches():
                with self.forward.observing_routes(use) as observed:
                    loss = self._loss(micro_batch, mini_batch, temperature, coef)
                for matches in observed.matches:
                    mini_batch.metrics.add_shares(agreement, *matches.sum(0))
                updater.backward(loss)
            updater.step()
            if "old_log_probs" not in batch.batch:
                assert number == 1, "further updates need the log-probs from before the first"
                columns = DataProto.from_dict({"old_log_probs": mini_batch.log_probs()})
        metrics = updater.finish()
        metrics |= {"actor/entropy_loss": metrics["actor/entropy"], "actor/entropy_coef": coef}
        if self.training.kl_loss:
            metrics["actor/kl_coef"] = self.training.kl_loss.coef
        return Updated(metrics, columns)

    def _loss(
        self, micro_batch: MicroBatch, mini_batch: MiniBatch, temperature: float, entropy_coef: float
    ) -> Tensor:
        """Loss = pg_loss - entropy_coef * entropy + kl_coef * kl_loss + coef * distillation."""
        assert self.training is not None, "the reference is never updated"
        tensors, metrics = micro_batch.tensors, mini_batch.metrics
        mask = tensors["loss_mask"]  # (B, R)
        teachers = None if self.distillation is None else self.distillation.teachers
        result = self.forward.log_probs(
            micro_batch.rows,
            temperature,
            with_entropy=True,
            reference=self.full_kl_reference,
            divergence=teachers and teachers.divergence(micro_batch.rows, temperature),
        )
        assert result.entropy is not None, "requested above"
        if "old_log_probs" not in tensors:
            mini_batch.computed.append(result.log_probs.detach())
        policy = self._policy_loss(result.log_probs, tensors)
        loss = self._aggregate(policy.per_token, tensors, mini_batch)
        metrics.add_loss("actor/pg_loss", loss)
        for name, values in policy.statistics.items():
            metrics.add_mean(f"actor/{name}", values, mask)
        metrics.add_mean("actor/entropy", result.entropy, mask)
        if not self.training.uses_advantages:
            loss = torch.zeros_like(loss)
        if entropy_coef:
            loss = loss - entropy_coef * self._aggregate(result.entropy, tensors, mini_batch)
        if self.distillation is not None:
            loss = loss + self.distillation.coef * self._distillation_loss(result, tensors, mini_batch)
        kl_loss = self.training.kl_loss
        if kl_loss:
            ref_log_probs = tensors.get("ref_log_probs")
            per_token = kl_divergence(result.log_probs, ref_log_probs, mask, kl_loss.kind, result.kl)
            kl = self._aggregate(per_token, tensors, mini_batch)
            metrics.add_loss("actor/kl_loss", kl)
            if kl_loss.coef:
                loss = loss + kl_loss.coef * kl
        return loss

    def _distillation_loss(
        self, result: TokenLogProbs, tensors: dict[str, Tensor], mini_batch: MiniBatch
    ) -> Tensor:
        assert self.distillation is not None, "asked before"
        per_token = self.distillation.teachers.per_token(result, tensors)
        loss = self._aggregate(per_token, tensors, mini_batch)
        mini_batch.metrics.add_loss("distillation/loss", loss)
        self.distillation.teachers.add_metrics(mini_batch.metrics, per_token, tensors)
        return loss

    def _aggregate(self, per_token: Tensor, tensors: dict[str, Tensor], mini_batch: MiniBatch) -> Tensor:
        mask, weights = tensors["loss_mask"], tensors.get("sequence_weights")
        return aggregate_loss(per_token, mask, self.config.loss_avg_mode, mini_batch.denominators, weights)

    def _policy_loss(self, log_probs: Tensor, tensors: dict[str, Tensor]) -> PolicyLoss:
        # of each token, with importance weights of the batch or of the bypass mode
        mask, current = tensors["loss_mask"], log_probs.detach()
        old = tensors.get("old_log_probs", current)
        policy = self.policy_loss(
            PolicyLossInputs(
                log_probs, old, tensors["advantages"], mask, tensors.get("selected"), **self.loss_options
            )
        )
        weights = tensors.get("rollout_is_weights")
        if self.training is not None and self.training.correction is not None:
            arguments = current, tensors["rollout_log_probs"], mask, self.training.correction
            weights = importance_weights(*arguments) * rejection_mask(*arguments)
        return weighted(policy, weights, mask)
