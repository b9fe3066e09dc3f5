# SPDX-License-Identifier: Apache-2.0
"""Policy losses: first of tokens, then with one ratio per response, whatever its length.

To add one, register a function from `PolicyLossInputs` to `PolicyLoss` under the name that
`worker.actor.loss_type` selects. The actor aggregates `per_token` (see `aggregation.py`) and logs the mean of
each of the `statistics` as `actor/<name>`. A loss that selects tokens over the whole mini batch has a
function of the same name in `token_selection.py`.

`gspo` and `gspo_token` have a loss per token, because advantages may differ between tokens; `geo_mean` and
`sppo` have one per sequence, repeated at every response token.
"""

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO, ratio_of
from verl.algorithms.policy_loss_types import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    PolicyTerms,
    clipped_surrogate,
    dual_clipped_surrogate,
    policy_loss,
    policy_terms,
    sequence_loss,
    sequence_mean,
)
from verl.utils.masking import check_same_shape, masked_mean

PROBABILITY_EPS = 1e-8  # keeps the log-probability of all other tokens finite


@POLICY_LOSSES.register("default")
def ppo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Clipped surrogate loss of PPO with separate bounds, and a second bound for negative advantages.

        ratio = exp(clamp(log_probs - old_log_probs, -20, 20))
        clipped = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
        L = min(clipped, -A dual)    where A < 0
        L = clipped                  elsewhere

    The gradient is zero where a bound is active. `pg_clipfrac_higher` counts tokens clipped on either side,
    `pg_clipfrac_lower` tokens with negative advantage at the dual bound.

    Source: PPO, equation 7 (https://arxiv.org/abs/1707.06347); unequal bounds: DAPO, section 3.1
    (https://arxiv.org/abs/2503.14476); dual clip: "Mastering Complex Control in MOBA Games", equation 5
    (https://arxiv.org/abs/1912.09729).
    """
    terms = policy_terms(inputs)
    return dual_clipped_surrogate(terms, terms.ratio, inputs)


@POLICY_LOSSES.register("gpg")
def gpg(inputs: PolicyLossInputs) -> PolicyLoss:
    """Plain policy gradient without ratio and bounds.

        L = -A log_probs

    Source: "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", section 3
    (https://arxiv.org/abs/2504.02546).
    """
    terms = policy_terms(inputs)
    return policy_loss(terms, -terms.advantages * terms.log_probs)


@POLICY_LOSSES.register("cispo")
def cispo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Policy gradient with clipped importance weights: a bound limits a token's weight, never its gradient.

        L = -stop_gradient(clip(ratio, 1 - low, 1 + high)) A log_probs

    `pg_clipfrac_higher` counts tokens with a clipped weight. The authors use no lower bound (`clip_ratio_low`
    1) and a high upper one.

    Source: MiniMax-M1, section 3.1, equations 4 and 5 (https://arxiv.org/abs/2506.13585).
    """
    terms = policy_terms(inputs)
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1 - inputs.clip_ratio_low, 1 + inputs.clip_ratio_high)
    return policy_loss(
        terms, -weight * terms.advantages * terms.log_probs, pg_clipfrac_higher=weight != ratio
    )


@POLICY_LOSSES.register("sapo")
def sapo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Soft bound on the ratio: the gradient fades with the distance from ratio 1.

        L = -A s 4 / tau    with s = sigmoid(tau (ratio - 1))
        tau = tau_positive where A > 0, tau_negative elsewhere

    It keeps a fraction 4 s (1 - s) of the gradient of -A ratio. tau is larger for negative advantages by
    default, because lowering the probability of one token raises that of many others.

    Source: "Soft Adaptive Policy Optimization" (https://arxiv.org/abs/2511.20347); the authors average over
    sequences: `worker.actor.loss_avg_mode` seq.
    """
    terms = policy_terms(inputs)
    tau = torch.where(terms.advantages > 0, inputs.tau_positive, inputs.tau_negative)  # (B, R)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return policy_loss(terms, -terms.advantages * gate)


@POLICY_LOSSES.register("clip_cov")
def clip_cov(inputs: PolicyLossInputs) -> PolicyLoss:
    """PPO without the dual bound and without a few tokens that reduce the entropy most.

        L = 0                                                   for selected tokens
        L = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))    elsewhere

    `token_selection.clip_cov` selects them by the covariance of advantage and log-prob. `clip_cov_frac` is
    the selected fraction of the tokens, `pg_clipfrac_higher` that of PPO's bounds.

    Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4.2
    (https://arxiv.org/abs/2505.22617).
    """
    terms = policy_terms(inputs)
    selected = _selected(inputs, "clip_cov")
    surrogate, is_clipped = clipped_surrogate(
        terms.ratio, terms.advantages, inputs.clip_ratio_low, inputs.clip_ratio_high
    )
    per_token = surrogate.masked_fill(selected, 0)
    return policy_loss(terms, per_token, pg_clipfrac_higher=is_clipped, clip_cov_frac=selected)


@POLICY_LOSSES.register("kl_cov")
def kl_cov(inputs: PolicyLossInputs) -> PolicyLoss:
    """Surrogate loss without bounds, with a KL penalty on the few tokens that reduce the entropy most.

        L = -A ratio + ppo_kl_coef |log_probs - old_log_probs|    for selected tokens
        L = -A ratio                                              elsewhere

    `token_selection.kl_cov` selects the tokens with the largest covariance of advantage and log-prob;
    `kl_cov_frac` is their fraction. The penalty has no gradient at ratio 1.

    Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4.2
    (https://arxiv.org/abs/2505.22617).
    """
    terms = policy_terms(inputs)
    selected = _selected(inputs, "kl_cov")
    penalty = (inputs.ppo_kl_coef * terms.log_ratio.abs()).masked_fill(~selected, 0)
    return policy_loss(terms, -terms.advantages * terms.ratio + penalty, kl_cov_frac=selected)


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(inputs: PolicyLossInputs) -> PolicyLoss:
    """Policy gradient inside a trust region on the change of the token's probability.

        L = -A stop_gradient(min(ratio, dual)) log_probs M
        M = p - p_old <= high     where A > 0
        M = p - p_old >= -low     elsewhere        with p = exp(log_probs)

    The bounds are probabilities: rare tokens may change by large factors. `pg_clipfrac_higher` counts tokens
    outside of the region (M = 0), `pg_clipfrac_lower` tokens with a ratio above `dual`.

    Source: "Rethinking the Trust Region in LLM Reinforcement Learning", Binary-TV
    (https://arxiv.org/abs/2602.04879).
    """
    terms = policy_terms(inputs)
    move = terms.log_probs.detach().exp() - terms.old_log_probs.exp()  # (B, R)
    is_inside = torch.where(
        terms.advantages > 0, move <= inputs.clip_ratio_high, move >= -inputs.clip_ratio_low
    )
    return _inside_trust_region(terms, is_inside, inputs.clip_ratio_dual)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(inputs: PolicyLossInputs) -> PolicyLoss:
    """Policy gradient inside a trust region on the KL divergence between "this token" and "any other".

        L = -A stop_gradient(min(ratio, dual)) log_probs M
        KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))
        M = KL <= high or p <= p_old    where A > 0
        M = KL <= low or p >= p_old     elsewhere        with p = exp(log_probs)

    A token moving back to the old policy always counts. Statistics as in `dppo_tv`.

    Source: "Rethinking the Trust Region in LLM Reinforcement Learning", Binary-KL
    (https://arxiv.org/abs/2602.04879).
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
    """Regression of the log-ratio on the advantage: off-policy data without ratios or bounds.

        L = -(A log_probs - beta / 2 (log_probs - old_log_probs)^2)

    Up to a constant this is (A - beta log_ratio)^2 / (2 beta), minimal where log-probs moved by A / beta.

    Source: "Offline Regularised Reinforcement Learning for Large Language Models Alignment"
    (https://arxiv.org/abs/2405.19107), per token, with the advantage instead of reward minus value.
    """
    beta = inputs.dro_beta
    if beta is None or not beta > 0:
        raise ValueError(f"`worker.actor.loss_type` dro needs `worker.actor.dro_beta` above zero, got {beta}")
    terms = policy_terms(inputs)
    return policy_loss(terms, -(terms.advantages * terms.log_probs - beta / 2 * terms.log_ratio.square()))


def weighted(loss: PolicyLoss, weights: Tensor | None, mask: Tensor) -> PolicyLoss:
    """Multiply a loss by importance weights (B, R), without gradient; None changes nothing.

    L[i,t] w[i,t]                                       for token-level losses
    L[i] exp(sum_t m[i,t] log w[i,t] / sum_t m[i,t])    for sequence-level losses
    """
    if weights is None:
        return loss
    check_same_shape(per_token=loss.per_token, weights=weights, mask=mask)
    weights = weights.detach().masked_fill(mask == 0, 1)
    if loss.is_sequence_level:
        weights = masked_mean(weights.log(), mask, dim=-1).exp().unsqueeze(-1)  # (B, 1)
    return loss._replace(per_token=loss.per_token * weights)


def _inside_trust_region(terms: PolicyTerms, is_inside: Tensor, bound: float) -> PolicyLoss:
    """Policy gradient with truncated importance weights, for tokens inside the trust region."""
    ratio = terms.ratio.detach()
    per_token = (-terms.advantages * ratio.clamp(max=bound) * terms.log_probs).masked_fill(~is_inside, 0)
    return policy_loss(terms, per_token, pg_clipfrac_higher=~is_inside, pg_clipfrac_lower=ratio > bound)


def _selected(inputs: PolicyLossInputs, name: str) -> Tensor:  # (B, R) bool
    if inputs.selected is None:
        raise ValueError(
            f"`worker.actor.loss_type` {name} needs `selected`: the tokens that"
            f" `TOKEN_SELECTIONS[{name!r}]` chose over the whole mini batch"
        )
    return inputs.selected.bool() & (inputs.response_mask != 0)


@POLICY_LOSSES.register("gspo")
def gspo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Clipped surrogate loss with the ratio of whole responses: a response is clipped as one.

        s_i = exp(clamp(sum_t m (log_probs - old_log_probs) / sum_t m, -20, 20))
        clipped = max(-A s_i, -A clip(s_i, 1 - low, 1 + high))
        L = min(clipped, -A dual)    where A < 0
        L = clipped                  elsewhere

    The ratio is a geometric mean, so the bounds are much narrower than PPO's: the authors use 3e-4 and 4e-4.
    They have no second bound; it keeps a response far from the old policy from dominating the update.
    `pg_clipfrac_higher` counts tokens of clipped responses, `pg_clipfrac_lower` those at the dual bound.

    Source: "Group Sequence Policy Optimization", section 4.1 (https://arxiv.org/abs/2507.18071); the authors
    average over sequences: `worker.actor.loss_avg_mode` seq.
    """
    terms = policy_terms(inputs)
    log_ratio = sequence_mean(terms.log_ratio, terms).unsqueeze(-1).expand_as(terms.log_ratio)  # (B, R)
    return dual_clipped_surrogate(terms, ratio_of(log_ratio), inputs)


@POLICY_LOSSES.register("gspo_token")
def gspo_token(inputs: PolicyLossInputs) -> PolicyLoss:
    """GSPO with a gradient per token, for advantages that differ inside a response.

        s_{i,t} = stop_gradient(s_i) exp(log_probs - stop_gradient(log_probs))
        L as in `gspo`, with s_{i,t} instead of s_i

    Value and, for equal advantages inside each response, gradient are those of `gspo`.

    Source: "Group Sequence Policy Optimization", section 4.3 (https://arxiv.org/abs/2507.18071).
    """
    terms = policy_terms(inputs)
    value = sequence_mean(terms.log_ratio, terms).detach().unsqueeze(-1)  # (B, 1)
    log_ratio = value + (terms.log_probs - terms.log_probs.detach())  # (B, R)
    return dual_clipped_surrogate(terms, ratio_of(log_ratio), inputs)


@POLICY_LOSSES.register("geo_mean")
def geo_mean(inputs: PolicyLossInputs) -> PolicyLoss:
    """Geometric mean of the tokens' ratios, each clipped first, so that outliers have little weight (GMPO).

        d = min(log_ratio, high)     where A_i > 0
        d = max(log_ratio, -low)     elsewhere
        L_i = -A_i exp(sum_t m d / sum_t m)    with A_i the mean of the response's advantages

    The bounds are on the log-ratio: the authors use 0.4 and 0.4. `pg_clipfrac_higher` counts clipped tokens.
    `worker.actor.loss_avg_mode` seq gives the source's mean over responses.

    Source: "Geometric-Mean Policy Optimization", algorithm 1 (https://arxiv.org/abs/2507.20673).
    """
    terms = policy_terms(inputs)
    advantages = sequence_mean(terms.advantages, terms)  # (B,)
    log_ratio = terms.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (B, R)
    clipped = torch.where(
        advantages.unsqueeze(-1) > 0,
        log_ratio.clamp(max=inputs.clip_ratio_high),
        log_ratio.clamp(min=-inputs.clip_ratio_low),
    )
    per_sequence = -advantages * sequence_mean(clipped, terms).exp()  # (B,)
    return sequence_loss(terms, per_sequence, pg_clipfrac_higher=clipped != log_ratio)


@POLICY_LOSSES.register("sppo")
def sppo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Regression of a response's log-ratio on its advantage over the policy's average response.

        L_i = (sum_t m (log_probs - old_log_probs) - eta A_i)^2    A_i: mean of the response's advantages

    For the estimator `sppo`. The log-ratio is a sum over tokens, so its gradient grows with the length.
    `worker.actor.loss_avg_mode` seq gives the source's mean over responses.

    Source: "Self-Play Preference Optimization for Language Model Alignment", section 4
    (https://arxiv.org/abs/2405.00675).
    """
    terms = policy_terms(inputs)
    target = inputs.sppo_eta * sequence_mean(terms.advantages, terms)  # (B,)
    return sequence_loss(terms, (terms.log_ratio.sum(-1) - target).square())
