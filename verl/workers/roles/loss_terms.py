# SPDX-License-Identifier: Apache-2.0
"""The loss of an update as a list of terms: the sum of `coef` x aggregate(term), each a loss per token.

A term's aggregate divides by the tokens or sequences of its mask in the whole mini batch, on all ranks, so
the loss does not depend on the division into micro batches. A forward pass computes the union of their needs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from verl.algorithms.aggregation import aggregate_loss
from verl.algorithms.kl import FULL, KLLoss, kl_divergence
from verl.algorithms.policy_loss_types import PolicyLossOptions
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs, weighted
from verl.algorithms.rollout_correction import importance_weights, rejection_mask
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.worker import ActorConfig
from verl.models.fused_log_probs import TokenLogProbs
from verl.protocol import DataProto
from verl.utils.registry import Registry
from verl.workers.roles.updater import MiniBatch

ENTROPY = "actor/entropy"
BUILT_IN = ("actor/pg_loss", ENTROPY, "distillation/loss", "actor/kl_loss")
Tensors = Mapping[str, Tensor]  # columns of a micro batch, on the device


LOSS_TERMS: Registry[Any] = Registry("worker.actor.loss_terms")  # of files only


class TokenLoss(NamedTuple):
    """The loss of each token of a micro batch, and values to log."""

    per_token: Tensor  # (B, R), read where the term's mask is one
    means: Mapping[str, tuple[Tensor, Tensor]] = {}  # by metric: values (B, R), and the mask of their mean


@dataclass(frozen=True)
class LossTerm:
    """A term of the loss.

    Attributes:
        name: Metric of the aggregated term, such as `actor/kl_loss`.
        coef: Weight in the loss; with 0 the term is only logged.
        per_token: Computes the loss from the results of the forward pass and the columns of the batch.
        needs: Fields of `TokenLogProbs` besides `log_probs`, and columns of the batch, that `per_token` and
            `mask` read.
        mask: Computes the tokens (B, R) of the term from the columns of a batch; a token with 0 counts in
            neither the sum nor the denominator. None: all of `loss_mask`, which always bounds it.
        is_logged: False leaves out the metric `name`.
    """

    name: str
    coef: float
    per_token: Callable[[TokenLogProbs, Tensors], TokenLoss]
    needs: Collection[str] = ()
    mask: Callable[[Tensors], Tensor] | None = None
    is_logged: bool = True

    @property
    def mask_column(self) -> str:
        return "loss_mask" if self.mask is None else f"mask of {self.name}"


def needed_results(terms: Iterable[LossTerm]) -> set[str]:
    """Return the fields of `TokenLogProbs` that the terms read."""
    return {name for term in terms for name in term.needs if name in TokenLogProbs._fields}


def needed_columns(terms: Iterable[LossTerm], batch: DataProto) -> list[str]:
    """Return the columns that the terms need; raise `ValueError` if the batch lacks one."""
    needed = [(name, term) for term in terms for name in term.needs if name not in TokenLogProbs._fields]
    for name, term in needed:
        if name not in batch.batch:
            raise ValueError(
                f"the loss term {term.name!r} needs the column `{name}`, and the batch has"
                f" {sorted(batch.batch.keys())}: turn on what computes it, or remove it from `needs`"
            )
    return list(dict(needed))


def with_masks(batch: DataProto, terms: Iterable[LossTerm]) -> DataProto:
    """Add the masks of the terms that have one, a column for each."""
    tensors = dict(batch.batch.items())
    masks = {
        term.mask_column: term.mask(tensors).ne(0) * tensors["loss_mask"]
        for term in terms
        if term.mask is not None
    }
    return batch.merge(masks) if masks else batch


def sum_terms(
    terms: Sequence[LossTerm], result: TokenLogProbs, tensors: Tensors, mini_batch: MiniBatch, mode: str
) -> Tensor:
    """Return a micro batch's share of the loss of its mini batch, and add the metrics of its terms.

    Args:
        mode: Aggregation of the tokens, a name of `AGGREGATIONS`.
    """
    total = result.log_probs.new_zeros(())
    for term in terms:
        found = term.per_token(result, tensors)
        mask = tensors["loss_mask"]  # that of a part of the micro batch
        if term.mask is not None:
            mask = mask * tensors[term.mask_column]
        denominators, weights = mini_batch.masks[term.mask_column], tensors.get("sequence_weights")
        loss = aggregate_loss(found.per_token, mask, mode, denominators, weights)
        if term.is_logged:
            mini_batch.metrics.add_loss(term.name, loss)
        for name, (values, counted) in found.means.items():
            mini_batch.metrics.add_mean(name, values, counted)
        if term.coef:
            total = total + term.coef * loss
    return total


class PolicyTokens:
    """The policy loss of tokens, with importance weights of the batch or, in the bypass mode, its own."""

    def __init__(
        self, config: ActorConfig, loss_type: str, correction: RolloutCorrectionConfig | None
    ) -> None:
        self.loss, self.correction = POLICY_LOSSES[loss_type], correction
        # the section and the inputs of losses use the same names
        self.options = {entry.name: getattr(config, entry.name) for entry in fields(PolicyLossOptions)}

    def __call__(self, result: TokenLogProbs, tensors: Tensors) -> TokenLoss:
        mask, current = tensors["loss_mask"], result.log_probs.detach()
        old = tensors.get("old_log_probs", current)
        inputs = result.log_probs, old, tensors["advantages"], mask, tensors.get("selected")
        policy = self.loss(PolicyLossInputs(*inputs, **self.options))
        weights = tensors.get("rollout_is_weights")
        if self.correction is not None:
            arguments = current, tensors["rollout_log_probs"], mask, self.correction
            weights = importance_weights(*arguments) * rejection_mask(*arguments)
        policy = weighted(policy, weights, mask)
        means = {f"actor/{name}": (values, mask) for name, values in policy.statistics.items()}
        return TokenLoss(policy.per_token, means)


def entropy_term(coef: float) -> LossTerm:
    """Return the entropy bonus, the negative term of weight `coef`."""

    def per_token(result: TokenLogProbs, tensors: Tensors) -> TokenLoss:
        assert result.entropy is not None, "the term needs it"
        return TokenLoss(result.entropy, {ENTROPY: (result.entropy, tensors["loss_mask"])})

    return LossTerm(ENTROPY, -coef, per_token, ["entropy"], is_logged=False)


def kl_term(loss: KLLoss) -> LossTerm:

    def per_token(result: TokenLogProbs, tensors: Tensors) -> TokenLoss:
        reference, mask = tensors.get("ref_log_probs"), tensors["loss_mask"]
        return TokenLoss(kl_divergence(result.log_probs, reference, mask, loss.kind, result.kl))

    return LossTerm("actor/kl_loss", loss.coef, per_token, ["kl"] if loss.kind == FULL else [])
