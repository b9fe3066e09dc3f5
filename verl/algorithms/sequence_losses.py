# SPDX-License-Identifier: Apache-2.0
"""Policy losses with one ratio per response, whatever its length. To add one, see `policy_losses.py`.

`gspo` and `gspo_token` have a loss per token, because advantages may differ between tokens; `geo_mean` and
`sppo` have one per sequence, repeated at every response token.
"""

import torch

from verl.algorithms.kl import MAX_LOG_RATIO, ratio_of
from verl.algorithms.policy_loss_types import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    dual_clipped_surrogate,
    policy_terms,
    sequence_loss,
    sequence_mean,
)


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
