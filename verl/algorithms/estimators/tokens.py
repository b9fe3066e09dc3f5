# SPDX-License-Identifier: Apache-2.0
"""Estimators with an advantage per token: GAE, REINFORCE++, ReMax and the optimal token baselines.

Tokens inside a response that the policy did not write, such as tool output, are skipped: later rewards reach
earlier tokens without being discounted by them, and they enter no mean. Rewards on such tokens are lost.
"""

import torch
from torch import Tensor

from verl.algorithms.advantage_math import (
    Sequences,
    by_rows,
    count_tokens,
    discounted_advantages,
    discounted_returns,
    response_tokens,
    reverse_cumsum,
    row_blocks,
    top_two,
    whiten,
    zero_outside,
)
from verl.algorithms.advantage_types import ADV_ESTIMATORS, AdvantageInputs, Advantages, require_field

WEIGHT_EPS = 1e-8  # keeps the baseline finite where all weights are zero


@ADV_ESTIMATORS.register("gae")
@torch.no_grad()
def gae(inputs: AdvantageInputs) -> Advantages:
    """Generalized advantage estimation, whitened over all response tokens.

        delta_t = r_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lam * A_next    V and A after the last response token are 0
        returns = A + V                             before whitening; the critic's target
        A       = (A - mean(A)) / sqrt(var(A) + 1e-8)

    `next` is the next response token.

    Source: "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16
    (https://arxiv.org/abs/1506.02438).
    """
    kept = response_tokens(inputs)
    values = require_field(inputs, "gae", "values", like=kept)
    advantages = discounted_advantages(inputs.token_level_rewards, values, kept, inputs.gamma, inputs.lam)
    returns = by_rows(torch.add, kept, advantages, values)
    return Advantages(whiten(advantages, kept, "gae"), returns)


@ADV_ESTIMATORS.register("reinforce_plus_plus")
@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE without a group: the discounted return of each token, whitened over the batch.

        G_t = r_t + gamma * G_next    G after the last response token is 0
        A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8)    mean and unbiased variance over all response tokens

    Source: "REINFORCE++", section 3 (https://arxiv.org/abs/2501.03262).
    """
    kept = response_tokens(inputs)
    returns = discounted_returns(inputs.token_level_rewards, kept, inputs.gamma)
    return Advantages(whiten(returns, kept, "reinforce_plus_plus"), returns)


@ADV_ESTIMATORS.register("remax")
@torch.no_grad()
def remax(inputs: AdvantageInputs) -> Advantages:
    """Return of each token minus the score of the greedy response to the same prompt.

        G_t = sum_{s >= t} r_s    over response tokens
        A_t = G_t - R_greedy

    One sampled response per prompt is enough.

    Source: "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models", algorithm 2 (https://arxiv.org/abs/2310.10505).
    """
    kept = response_tokens(inputs)
    baselines = require_field(inputs, "remax", "reward_baselines", like=inputs.group_ids)
    returns = discounted_returns(inputs.token_level_rewards, kept)
    return Advantages(by_rows(torch.sub, kept, returns, baselines.float().unsqueeze(-1)), returns)


@ADV_ESTIMATORS.register("optimal_token_baseline")
@torch.no_grad()
def optimal_token_baseline(inputs: AdvantageInputs) -> Advantages:
    """Return of each token minus the minimum-variance baseline of its group at that position.

        G_t = sum_{s >= t} r_s
        w_t = (1 - 2 p_t + sum_v p_t(v)**2) * importance_t**2
        W_t = sum_{s <= t} w_s
        B_t = sum_j(G[j,t] W[j,t]) / (sum_j(W[j,t]) + 1e-8)    over the responses j with a token at t
        A_t = G_t - B_t

    All sums cover response tokens. w is the squared norm of the gradient of a token's log-prob with respect
    to the logits. The importance weights (trainer over engine) default to one. B is 0 past the end of the
    second longest response of a group, and for a lone response.

    Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"
    (https://proceedings.mlr.press/v306/li26hy.html), with its logit-gradient proxy for w.
    """
    kept = response_tokens(inputs)
    positions = torch.arange(1, kept.shape[1] + 1, device=kept.device, dtype=torch.float32)
    lengths = torch.zeros_like(kept[:, 0], dtype=torch.float64)  # up to the last token, including tool tokens
    for rows in row_blocks(kept):
        lengths[rows] = zero_outside(positions, kept[rows]).amax(-1).double()
    return _token_baseline(inputs, kept, lengths, "optimal_token_baseline")


@ADV_ESTIMATORS.register("tir_optimal_token_baseline")
@torch.no_grad()
def tir_optimal_token_baseline(inputs: AdvantageInputs) -> Advantages:
    """`optimal_token_baseline` for responses with tool calls: compares the k-th token that each policy wrote.

    Here t counts the tokens written by the policy, so tool outputs of different lengths cause no shift.

    Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"
    (https://proceedings.mlr.press/v306/li26hy.html), tool-integrated reasoning.
    """
    kept = response_tokens(inputs)
    return _token_baseline(inputs, kept, count_tokens(kept), "tir_optimal_token_baseline")


def _token_baseline(inputs: AdvantageInputs, kept: Tensor, lengths: Tensor, estimator: str) -> Advantages:
    """Subtract the group's baseline at each position up to the second largest of `lengths` (B,)."""
    by_own_tokens = estimator == "tir_optimal_token_baseline"
    ids, num_tokens = inputs.group_ids, kept.shape[1]
    returns = torch.empty_like(kept, dtype=torch.float32)
    weights = returns.new_zeros(len(torch.bincount(ids)), num_tokens)  # (G, R)
    weighted_returns = torch.zeros_like(weights)
    for rows in row_blocks(kept):
        sums = reverse_cumsum(zero_outside(inputs.token_level_rewards[rows], kept[rows]))
        zero_outside(sums, kept[rows], out=returns[rows])
        weight = _cumulative_weights(inputs, kept, rows, estimator)  # (b, R)
        weighted_return = weight * returns[rows]
        if by_own_tokens:
            weight, weighted_return = compact(weight, kept[rows]), compact(weighted_return, kept[rows])
        weights.index_add_(0, ids[rows], weight)
        weighted_returns.index_add_(0, ids[rows], weighted_return)

    _, ends = top_two(lengths, Sequences(kept, lengths, lengths, ids))  # (G,)
    positions = torch.arange(num_tokens, device=kept.device)
    baselines = torch.where(
        positions < ends.unsqueeze(-1), weighted_returns / (weights + WEIGHT_EPS), 0.0
    )  # (G, R)

    def advantage(returns: Tensor, ids: Tensor, kept: Tensor) -> Tensor:  # of a block of rows
        baseline = baselines[ids]
        return returns - (spread(baseline, kept) if by_own_tokens else baseline)

    return Advantages(by_rows(advantage, kept, returns, ids, kept), returns)


def _cumulative_weights(inputs: AdvantageInputs, kept: Tensor, rows: slice, estimator: str) -> Tensor:
    """W_t of some rows, (b, R); zero outside of the response tokens."""
    probs = require_field(inputs, estimator, "log_probs", like=kept)[rows].exp()
    weights = 1 - 2 * probs + require_field(inputs, estimator, "sum_squared_probs", like=kept)[rows]
    if inputs.importance_weights is not None:
        weights = weights * require_field(inputs, estimator, "importance_weights", like=kept)[rows].square()
    return zero_outside(zero_outside(weights, kept[rows]).cumsum(-1), kept[rows])


def compact(values: Tensor, kept: Tensor) -> Tensor:
    """Move the kept values of each row to its start, in order and padded with zeros: (b, R) to (b, R)."""
    num_tokens = kept.shape[1]
    targets = torch.where(kept, kept.cumsum(-1) - 1, num_tokens)  # the rest goes into one extra column
    return values.new_zeros(len(values), num_tokens + 1).scatter_(-1, targets, values)[:, :num_tokens]


def spread(values: Tensor, kept: Tensor) -> Tensor:
    """Undo `compact`; values outside of the kept tokens are meaningless."""
    return values.gather(-1, (kept.cumsum(-1) - 1).clamp(min=0))
