# SPDX-License-Identifier: Apache-2.0
"""Log-probs and loss of the policy, on one data-parallel rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from verl.algorithms.kl import KLLoss
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.algorithms.token_selection import selection_of
from verl.batch_keys import OLD_ROUTES, ROUTE_MATCHES, ROUTES, TEACHER_KEYS, TEACHER_MEDIA
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.worker import ActorConfig
from verl.protocol import DataProto
from verl.workers.packing.observers import OBSERVERS, ForwardObserver
from verl.workers.packing.row_forward import RowForward
from verl.workers.roles.loss_terms import (
    ENTROPY,
    LOSS_TERMS,
    LossTerm,
    PolicyTokens,
    entropy_term,
    kl_term,
    needed_columns,
    needed_results,
    sum_terms,
    with_masks,
)
from verl.workers.roles.routers import CHOICES, RouterReplay, column_of
from verl.workers.roles.updater import (
    MicroBatch,
    MiniBatch,
    MiniBatchSelection,
    Training,
    Updater,
    compute_experience,
)

if TYPE_CHECKING:  # a policy without teachers needs none of it
    from verl.workers.roles.teachers import Teachers

OPTIONAL_KEYS = [
    *("old_log_probs", "row_ids", "ref_log_probs", "sequence_weights", "rollout_is_weights"),
    *("rollout_log_probs", CHOICES, ROUTE_MATCHES, *TEACHER_KEYS),
]
REINFORCE = "gpg"  # the loss without a ratio


@dataclass(frozen=True)
class ActorTraining(Training):
    """Optimizer and loss options of a policy that is updated."""

    kl_loss: KLLoss | None = None  # None leaves the reference out of the loss
    reference: RowForward | None = None  # read only for the KL over the whole vocabulary
    correction: RolloutCorrectionConfig | None = None  # weights computed here, with the update's log-probs
    is_reinforce: bool = False  # REINFORCE instead of `loss_type`
    teachers: "Teachers | None" = None  # that a term of the loss pulls the policy towards
    uses_advantages: bool = True  # False leaves the policy loss out


class Updated(NamedTuple):
    """Results of an update on one rank."""

    metrics: dict[str, float]  # equal on all ranks
    columns: DataProto | None  # `old_log_probs` of this rank's rows, if the batch came without


class DataParallelPPOActor:
    """Computes log-probs of sequences, and updates the policy.

    Example::

        actor = DataParallelPPOActor(config.actor, forward, ActorTraining(optimizer, scheduler))
        old_log_probs = actor.compute_log_probs(batch, temperature=1.0)  # a batch with this column
        metrics, _ = actor.update(batch.merge(old_log_probs), temperature=1.0)
    """

    def __init__(self, config: ActorConfig, forward: RowForward, training: ActorTraining) -> None:
        self.config, self.forward, self.training = config, forward, training
        self.replay: RouterReplay | None = None  # None: a dense model
        if forward.routers():
            self.replay = RouterReplay(config.router_replay, forward.model)
        loss_type = REINFORCE if training.is_reinforce else config.loss_type
        self.terms = _terms(config, training, loss_type)
        self.observers: list[ForwardObserver] = [  # of files
            OBSERVERS[spec](forward.model) for spec in config.observers
        ]
        self.updater = Updater("actor", config, forward, training, config.ppo_epochs)
        choose = selection_of(loss_type, POLICY_LOSSES[loss_type])
        self.selection = None if choose is None else MiniBatchSelection(config, forward, choose)

    @property
    def reads_reference(self) -> bool:
        return "kl" in needed_results(self.terms)

    @property
    def runs_teachers(self) -> bool:
        return "divergence" in needed_results(self.terms)

    def compute_log_probs(
        self,
        batch: DataProto,
        temperature: float,
        *,
        with_sum_squares: bool = False,
        reference: RowForward | None = None,
    ) -> DataProto:
        """Compute log-probs of the response tokens under the current weights; collective over all ranks.

        See `PackedForward.log_probs` for the arguments.

        Returns:
            The columns of this pass, on CPU: `old_log_probs`, `sum_squared_probs` and `full_kl` if requested;
            of a mixture what its update reads, `expert_choices`, `route_matches`, `old_routes`.
        """
        replaying = [] if self.replay is None else self.replay.in_old_pass(batch)
        observers = [*self.updater.balance.counters(), *replaying, *self.observers]

        def columns(micro_batch: DataProto) -> dict[str, Tensor]:
            with self.forward.observed_by(observers) as observed:
                result = self.forward.log_probs(
                    micro_batch, temperature, with_sum_squares=with_sum_squares, reference=reference
                )
            found = {
                "old_log_probs": result.log_probs,
                "sum_squared_probs": result.sum_squared_probs,
                "full_kl": result.kl,
                **observed,
            }
            return {name: values for name, values in found.items() if values is not None}

        read = [name for observer in observers for name in observer.reads]
        found = compute_experience(self.config, self.forward, batch, columns, read)
        mask, routes = batch.batch["attention_mask"], found.pop(OLD_ROUTES, None)
        return DataProto.from_dict(found, {} if routes is None else {OLD_ROUTES: column_of(routes, mask)})

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
        coef = self.config.entropy_coef if entropy_coef is None else entropy_coef
        terms = [replace(term, coef=-coef) if term.name == ENTROPY else term for term in self.terms]
        updater, columns = self.updater, None
        rows = with_masks(self._read_by_update(batch), terms)
        replaying = [] if self.replay is None else self.replay.in_update(rows)
        observers = [*replaying, *self.observers]
        mini_batches = updater.mini_batches(rows, [term.mask_column for term in terms])
        for number, mini_batch in enumerate(mini_batches, 1):
            if self.selection is not None:
                selected = self.selection.add_to(mini_batch.batch, temperature, seed * 1_000_003 + number)
                mini_batch = replace(mini_batch, batch=selected)
            for micro_batch in mini_batch.micro_batches():
                with self.forward.observed_by(observers) as observed:
                    loss = self._loss(terms, micro_batch, mini_batch, temperature)
                if self.replay is not None and ROUTE_MATCHES in observed:
                    matches = observed.pop(ROUTE_MATCHES).sum(0)
                    mini_batch.metrics.add_shares(self.replay.metric(rows), *matches)
                for name, values in observed.items():
                    mask = micro_batch.tensors["loss_mask"]
                    mini_batch.metrics.add_mean(f"actor/{name}", values, mask)
                updater.backward(loss)
            updater.step()
            if "old_log_probs" not in batch.batch:
                assert number == 1, "further updates need the log-probs from before the first"
                columns = DataProto.from_dict({"old_log_probs": mini_batch.log_probs()})
        metrics = updater.finish()
        metrics |= {"actor/entropy_loss": metrics[ENTROPY], "actor/entropy_coef": coef}
        if self.training.kl_loss:
            metrics["actor/kl_coef"] = self.training.kl_loss.coef
        return Updated(metrics, columns)

    def _read_by_update(self, batch: DataProto) -> DataProto:
        keys = [*self.forward.keys, "advantages", *needed_columns(self.terms, batch)]
        keys += [key for key in OPTIONAL_KEYS if key in batch.batch]
        objects = [key for key in (TEACHER_MEDIA, *ROUTES) if key in batch.non_tensor_batch]
        return batch.select(list(dict.fromkeys(keys)), [*self.forward.object_keys, *objects])

    def _loss(
        self, terms: Sequence[LossTerm], micro_batch: MicroBatch, mini_batch: MiniBatch, temperature: float
    ) -> Tensor:
        training, needs = self.training, needed_results(terms)
        divergence = None
        if "divergence" in needs:
            assert training.teachers is not None, "only their term needs it"
            divergence = training.teachers.divergence(micro_batch.rows, temperature)
        result = self.forward.log_probs(
            micro_batch.rows,
            temperature,
            with_entropy="entropy" in needs,
            with_sum_squares="sum_squared_probs" in needs,
            reference=training.reference if "kl" in needs else None,
            divergence=divergence,
        )
        if "old_log_probs" not in micro_batch.tensors:
            mini_batch.computed.append(result.log_probs.detach())
        return sum_terms(terms, result, micro_batch.tensors, mini_batch, self.config.loss_avg_mode)


def _terms(config: ActorConfig, training: ActorTraining, loss_type: str) -> list[LossTerm]:
    """Return the terms of the loss: pg_loss - entropy_coef * entropy + coef * distillation + kl_coef * KL."""
    policy = PolicyTokens(config, loss_type, training.correction)
    terms = [
        LossTerm("actor/pg_loss", float(training.uses_advantages), policy),
        entropy_term(config.entropy_coef),
    ]
    if training.teachers is not None:
        terms.append(training.teachers.loss_term())
    if training.kl_loss:
        terms.append(kl_term(training.kl_loss))
    return [*terms, *(LOSS_TERMS[spec] for spec in config.loss_terms)]
