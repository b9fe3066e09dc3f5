# SPDX-License-Identifier: Apache-2.0
"""Policy losses: one number for each response token, whose mean falls when good responses become more likely.

Here are the losses of single tokens; `sequence_losses.py` has those that look at a whole response.
To add one: a function from `PolicyLossInputs` to `PolicyLoss`, registered under the name that
`worker.actor.loss_type` selects. The actor aggregates `per_token` (see `aggregation.py`) and logs the mean of
every entry of `statistics` over response tokens as `actor/<name>`, so neither needs a change elsewhere. A
loss that treats a few tokens of the whole mini batch differently has a namesake in `token_selection.py`.
"""

import torch
from torch import Tensor

from verl.algorithms import sequence_losses  # noqa: F401 (registers its losses)
from verl.algorithms.policy_loss_types import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    PolicyTerms,
    clipped_surrogate,
    policy_loss,
    policy_terms,
)
from verl.utils.masking import check_same_shape, masked_mean

PROBABILITY_EPS = 1e-8  # keeps the logarithm of the probability of all other tokens finite


@POLICY_LOSSES.register("default")
def ppo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Clipped surrogate loss of PPO, a bound for each side, and a second bound for negative advantages.

        ratio = exp(clamp(log_probs - old_log_probs, -20, 20))
        clipped = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
        L = min(clipped, -A dual)    where A < 0
        L = clipped                  elsewhere

    The gradient is zero where a bound holds; at ratio 1 it is the plain policy gradient -A grad(log_probs).
    `pg_clipfrac_higher` counts tokens whose ratio is clipped (on either side), `pg_clipfrac_lower` tokens
    with negative advantage at the dual bound, `ppo_kl` is -log(ratio), whose mean estimates KL(old || new).

    Source: PPO, equation 7 (https://arxiv.org/abs/1707.06347); unequal bounds: DAPO, section 3.1
    (https://arxiv.org/abs/2503.14476); dual clip: "Mastering Complex Control in MOBA Games", equation 5
    (https://arxiv.org/abs/1912.09729).

    Args:
        inputs: Reads the tensors and `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_dual`.

    Raises:
        ValueError: Shapes differ.
    """
    terms = policy_terms(inputs)
    clipped, is_clipped = clipped_surrogate(
        terms.ratio, terms.advantages, inputs.clip_ratio_low, inputs.clip_ratio_high
    )
    dual_bound = -terms.advantages * inputs.clip_ratio_dual
    is_dual = (terms.advantages < 0) & (clipped > dual_bound)
    per_token = torch.where(is_dual, dual_bound, clipped)
    return policy_loss(terms, per_token, pg_clipfrac_higher=is_clipped, pg_clipfrac_lower=is_dual)


@POLICY_LOSSES.register("gpg")
def gpg(inputs: PolicyLossInputs) -> PolicyLoss:
    """Plain policy gradient: no ratio, no bound.

        L = -A log_probs

    Several updates with the same responses are several steps of REINFORCE: nothing holds them back.

    Source: "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", section 3
    (https://arxiv.org/abs/2504.02546).

    Args:
        inputs: Reads the tensors; `old_log_probs` for `ppo_kl` only.

    Raises:
        ValueError: Shapes differ.
    """
    terms = policy_terms(inputs)
    return policy_loss(terms, -terms.advantages * terms.log_probs)


@POLICY_LOSSES.register("cispo")
def cispo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Policy gradient with clipped importance weights: a bound limits a token's weight, never its gradient.

        L = -stop_gradient(clip(ratio, 1 - low, 1 + high)) A log_probs

    No token is left out, so rare tokens that turn a chain of thought keep their gradient. The authors use
    no lower bound (`clip_ratio_low` 1) and a high upper one. `pg_clipfrac_higher` counts tokens whose weight
    is at a bound.

    Source: MiniMax-M1, section 3.1, equations 4 and 5 (https://arxiv.org/abs/2506.13585).

    Args:
        inputs: Reads the tensors and `clip_ratio_low`, `clip_ratio_high`.

    Raises:
        ValueError: Shapes differ.
    """
    terms = policy_terms(inputs)
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1 - inputs.clip_ratio_low, 1 + inputs.clip_ratio_high)
    return policy_loss(
        terms, -weight * terms.advantages * terms.log_probs, pg_clipfrac_higher=weight != ratio
    )


@POLICY_LOSSES.register("sapo")
def sapo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Soft bound on the ratio: the gradient fades with the distance from ratio 1 instead of stopping.

        L = -A s 4 / tau    with s = sigmoid(tau (ratio - 1))
        tau = tau_positive where A > 0, tau_negative elsewhere

    Of the gradient of the surrogate -A ratio a share of 4 s (1 - s) is left: all of it at ratio 1. A larger
    tau fades faster; for negative advantages it is larger by default, because lowering the probability of one
    token raises that of many others. No token is clipped.

    Source: "Soft Adaptive Policy Optimization" (https://arxiv.org/abs/2511.20347); the authors average over
    sequences: `worker.actor.loss_avg_mode` seq.

    Args:
        inputs: Reads the tensors and `tau_positive`, `tau_negative`, both above zero.

    Raises:
        ValueError: Shapes differ.
    """
    terms = policy_terms(inputs)
    tau = torch.where(terms.advantages > 0, inputs.tau_positive, inputs.tau_negative)  # (B, R)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return policy_loss(terms, -terms.advantages * gate)


@POLICY_LOSSES.register("clip_cov")
def clip_cov(inputs: PolicyLossInputs) -> PolicyLoss:
    """PPO without the dual bound, and without the few tokens that drive the entropy down most.

        L = 0                                                        for selected tokens
        L = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))         elsewhere

    The entropy falls by the covariance of advantage and log-prob, which a small share of the tokens makes
    up; a random choice among those takes no part. `token_selection.clip_cov` chooses over the mini batch.
    `clip_cov_frac` is the selected share of the tokens, `pg_clipfrac_higher` that of PPO's bounds.

    Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4.2
    (https://arxiv.org/abs/2505.22617).

    Args:
        inputs: Reads the tensors, `selected`, `clip_ratio_low`, `clip_ratio_high`.

    Raises:
        ValueError: Shapes differ, or `selected` is missing.
    """
    selected = _selected(inputs, "clip_cov")
    terms = policy_terms(inputs)
    surrogate, is_clipped = clipped_surrogate(
        terms.ratio, terms.advantages, inputs.clip_ratio_low, inputs.clip_ratio_high
    )
    per_token = surrogate.masked_fill(selected, 0)
    return policy_loss(terms, per_token, pg_clipfrac_higher=is_clipped, clip_cov_frac=selected)


@POLICY_LOSSES.register("kl_cov")
def kl_cov(inputs: PolicyLossInputs) -> PolicyLoss:
    """Surrogate loss without bounds; the few tokens that drive the entropy down most are held back.

        L = -A ratio + ppo_kl_coef |log_probs - old_log_probs|    for selected tokens
        L = -A ratio                                              elsewhere

    `token_selection.kl_cov` chooses the tokens with the largest covariance of advantage and log-prob in the
    mini batch. The penalty has no gradient while the policy is still the old one. `kl_cov_frac` is the
    selected share of the tokens.

    Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4.2
    (https://arxiv.org/abs/2505.22617).

    Args:
        inputs: Reads the tensors, `selected`, `ppo_kl_coef`.

    Raises:
        ValueError: Shapes differ, or `selected` is missing.
    """
    selected = _selected(inputs, "kl_cov")
    terms = policy_terms(inputs)
    penalty = (inputs.ppo_kl_coef * terms.log_ratio.abs()).masked_fill(~selected, 0)
    return policy_loss(terms, -terms.advantages * terms.ratio + penalty, kl_cov_frac=selected)


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(inputs: PolicyLossInputs) -> PolicyLoss:
    """Policy gradient inside a trust region of probabilities: by how much the token's probability has moved.

        L = -A stop_gradient(min(ratio, dual)) log_probs M
        M = p - p_old <= high     where A > 0
        M = p - p_old >= -low     elsewhere        with p = exp(log_probs)

    Rare tokens may change by large factors, frequent ones by small differences only; the bounds are
    probabilities, not ratios. `pg_clipfrac_higher` counts tokens outside of the region (M = 0),
    `pg_clipfrac_lower` tokens whose ratio is cut at `dual`.

    Source: "Rethinking the Trust Region in LLM Reinforcement Learning", Binary-TV
    (https://arxiv.org/abs/2602.04879).

    Args:
        inputs: Reads the tensors and `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_dual`.

    Raises:
        ValueError: Shapes differ.
    """
    terms = policy_terms(inputs)
    move = terms.log_probs.detach().exp() - terms.old_log_probs.exp()  # (B, R)
    is_inside = torch.where(
        terms.advantages > 0, move <= inputs.clip_ratio_high, move >= -inputs.clip_ratio_low
    )
    return _inside_trust_region(terms, is_inside, inputs.clip_ratio_dual)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(inputs: PolicyLossInputs) -> PolicyLoss:
    """Policy gradient inside a trust region of the KL divergence between "this token" and "any other".

        L = -A stop_gradient(min(ratio, dual)) log_probs M
        KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))
        M = KL <= high or p <= p_old    where A > 0
        M = KL <= low or p >= p_old     elsewhere        with p = exp(log_probs)

    A token that is on its way back to the old policy always counts. Statistics as in `dppo_tv`.

    Source: "Rethinking the Trust Region in LLM Reinforcement Learning", Binary-KL
    (https://arxiv.org/abs/2602.04879).

    Args:
        inputs: Reads the tensors and `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_dual`.

    Raises:
        ValueError: Shapes differ.
    """
    terms = policy_terms(inputs)
    log_p, log_p_old = terms.log_probs.detach(), terms.old_log_probs
    others, others_old = -log_p.expm1(), -log_p_old.expm1()  # 1 - p without cancellation
    kl = -log_p_old.exp() * (log_p - log_p_old)
    kl = kl + others_old * ((others_old + PROBABILITY_EPS) / (others + PROBABILITY_EPS)).log()  # (B, R)
    is_inside = torch.where(
        terms.advantages > 0,
        (kl <= inputs.clip_ratio_high) | (log_p <= log_p_old),
        (kl <= inputs.clip_ratio_low) | (log_p >= log_p_old),
    )
    return _inside_trust_region(terms, is_inside, inputs.clip_ratio_dual)


@POLICY_LOSSES.register("dro")
def dro(inputs: PolicyLossInputs) -> PolicyLoss:
    """Regression of the log-ratio on the advantage: off-policy data without ratios.

        L = -(A log_probs - beta / 2 (log_probs - old_log_probs)^2)

    Up to a constant this is (A - beta log_ratio)^2 / (2 beta), whose minimum is a policy that moved by
    A / beta: the answer of a KL-regularised objective. There is no bound, and none is needed.

    Source: "Offline Regularised Reinforcement Learning for Large Language Models Alignment"
    (https://arxiv.org/abs/2405.19107), here for each token, the advantage in place of reward less value.

    Args:
        inputs: Reads the tensors and `dro_beta`.

    Raises:
        ValueError: Shapes differ, or `dro_beta` is not above zero.
    """
    beta = inputs.dro_beta
    if beta is None or not beta > 0:
        raise ValueError(f"`worker.actor.loss_type` dro needs `worker.actor.dro_beta` above zero, got {beta}")
    terms = policy_terms(inputs)
    return policy_loss(terms, -(terms.advantages * terms.log_probs - beta / 2 * terms.log_ratio.square()))


def weighted(loss: PolicyLoss, weights: Tensor | None, mask: Tensor) -> PolicyLoss:
    """Multiply a loss by importance weights, through which no gradient flows.

        L[i,t] w[i,t]                                       for losses of tokens
        L[i] exp(sum_t m[i,t] log w[i,t] / sum_t m[i,t])    for losses of sequences

    The weight of a sequence is the geometric mean of its tokens' weights: zero if one of them is zero.

    Args:
        loss: Of a function in `POLICY_LOSSES`.
        weights: (B, R), zero or more; None changes nothing. What lies in the padding does not count.
        mask: One on response tokens, (B, R).

    Raises:
        ValueError: Shapes differ.
    """
    if weights is None:
        return loss
    check_same_shape(per_token=loss.per_token, weights=weights, mask=mask)
    weights = weights.detach().masked_fill(mask == 0, 1)
    if loss.is_sequence_level:
        weights = masked_mean(weights.log(), mask, dim=-1).exp().unsqueeze(-1)  # (B, 1)
    return loss._replace(per_token=loss.per_token * weights)


def _inside_trust_region(terms: PolicyTerms, is_inside: Tensor, bound: float) -> PolicyLoss:
    """Policy gradient with truncated importance weights, for the tokens inside of a trust region."""
    ratio = terms.ratio.detach()
    per_token = (-terms.advantages * ratio.clamp(max=bound) * terms.log_probs).masked_fill(~is_inside, 0)
    return policy_loss(terms, per_token, pg_clipfrac_higher=~is_inside, pg_clipfrac_lower=ratio > bound)


def _selected(inputs: PolicyLossInputs, name: str) -> Tensor:
    """Return the selected response tokens, (B, R) bool."""
    if inputs.selected is None:
        raise ValueError(
            f"`worker.actor.loss_type` {name} needs `selected`: the tokens that"
            f" `TOKEN_SELECTIONS[{name!r}]` chose over the whole mini batch"
        )
    check_same_shape(selected=inputs.selected, response_mask=inputs.response_mask)
    return inputs.selected.bool() & (inputs.response_mask != 0)
