# SPDX-License-Identifier: Apache-2.0
"""Inputs, outputs, registry and shared parts of the policy losses; `policy_losses.py` fills the registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO, ratio_of
from verl.utils.masking import check_same_shape, masked_mean
from verl.utils.registry import Registry


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions:
    """Coefficients of losses, under their names in `worker.actor`."""

    clip_ratio_low: float = 0.2  # the ratio is clipped at 1 - low ...
    clip_ratio_high: float = 0.2  # ... and at 1 + high
    clip_ratio_dual: float = 3.0  # bound on the ratio of tokens with negative advantage
    tau_positive: float = 1.0  # sharpness of the soft bound for positive advantages (sapo) ...
    tau_negative: float = 1.05  # ... and for negative ones
    ppo_kl_coef: float = 0.1  # weight of |log ratio| on the selected tokens (kl_cov)
    dro_beta: float | None = None  # weight of the squared log-ratio (dro)
    sppo_eta: float = 1.0  # weight of the advantage (sppo)


@dataclass(frozen=True)
class PolicyLossInputs(PolicyLossOptions):
    """Inputs of a loss. Rows are sequences; padding (`response_mask` 0) may hold anything, even NaN.

    Example::

        PolicyLossInputs(log_probs, old_log_probs, advantages, response_mask, clip_ratio_high=0.28)
    """

    log_probs: Tensor  # (B, R) float32, under the weights being trained; carries the gradient
    old_log_probs: Tensor  # (B, R) float32
    advantages: Tensor  # (B, R) float32
    response_mask: Tensor  # (B, R), one on response tokens
    selected: Tensor | None = None  # (B, R) bool, from `TOKEN_SELECTIONS` over the whole mini batch


class PolicyLoss(NamedTuple):
    """Result of a loss."""

    per_token: Tensor  # (B, R); padding holds finite values without gradient
    statistics: dict[str, Tensor]  # name -> (B, R), detached; means over response tokens are logged
    is_sequence_level: bool = False  # one loss per sequence, repeated at every response token


PolicyLossFunction = Callable[[PolicyLossInputs], PolicyLoss]
POLICY_LOSSES: Registry[PolicyLossFunction] = Registry("worker.actor.loss_type")


class PolicyTerms(NamedTuple):
    """Common terms of the losses, (B, R) each; in the padding zero (ratio one) and without gradient."""

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor  # log_probs - old_log_probs, not clamped
    ratio: Tensor  # exp(clamp(log_ratio, -20, 20))
    advantages: Tensor
    mask: Tensor


def policy_terms(inputs: PolicyLossInputs) -> PolicyTerms:
    """Return log-probs, ratios and advantages with the padding zeroed, after checking shapes."""
    check_same_shape(
        log_probs=inputs.log_probs,
        old_log_probs=inputs.old_log_probs,
        advantages=inputs.advantages,
        response_mask=inputs.response_mask,
        selected=inputs.selected,
    )
    padding = inputs.response_mask == 0  # (B, R)
    log_probs = inputs.log_probs.masked_fill(padding, 0)
    old_log_probs = inputs.old_log_probs.masked_fill(padding, 0)
    log_ratio = log_probs - old_log_probs
    ratio = ratio_of(log_ratio)
    advantages = inputs.advantages.masked_fill(padding, 0)
    return PolicyTerms(log_probs, old_log_probs, log_ratio, ratio, advantages, inputs.response_mask)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """`max(-A ratio, -A clip(ratio, 1 - low, 1 + high))`, and where the bound is active (no gradient), bool.

    Source: PPO, equation 7 (https://arxiv.org/abs/1707.06347).
    """
    unclipped = -advantages * ratio
    at_bounds = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, at_bounds), at_bounds > unclipped


def dual_clipped_surrogate(terms: PolicyTerms, ratio: Tensor, inputs: PolicyLossOptions) -> PolicyLoss:
    """Build the clipped surrogate loss with a second bound, -A dual, for negative advantages."""
    clipped, is_clipped = clipped_surrogate(
        ratio, terms.advantages, inputs.clip_ratio_low, inputs.clip_ratio_high
    )
    dual_bound = -terms.advantages * inputs.clip_ratio_dual
    is_dual = (terms.advantages < 0) & (clipped > dual_bound)
    per_token = torch.where(is_dual, dual_bound, clipped)
    return policy_loss(terms, per_token, pg_clipfrac_higher=is_clipped, pg_clipfrac_lower=is_dual)


def policy_loss(terms: PolicyTerms, per_token: Tensor, **statistics: Tensor) -> PolicyLoss:
    """Build the result of a token-level loss; `ppo_kl`, -log(ratio), estimates KL(old || new)."""
    clamped = terms.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    detached = {name: values.detach().float() for name, values in statistics.items()}
    return PolicyLoss(per_token, detached | {"ppo_kl": -clamped})


def sequence_loss(terms: PolicyTerms, per_sequence: Tensor, **statistics: Tensor) -> PolicyLoss:
    """Build the result of a sequence-level loss (B,), repeated at every response token."""
    per_token = per_sequence.unsqueeze(-1).expand_as(terms.log_ratio).masked_fill(terms.mask == 0, 0)
    return policy_loss(terms, per_token, **statistics)._replace(is_sequence_level=True)


def sequence_mean(values: Tensor, terms: PolicyTerms) -> Tensor:
    """Mean over the response tokens of each sequence, (B,) from (B, R); zero for an empty one."""
    return masked_mean(values, terms.mask, dim=-1)
