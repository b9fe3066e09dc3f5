# SPDX-License-Identifier: Apache-2.0
"""The optimal token baseline: for each position of a group of responses, the baseline of least variance."""

import torch
from torch import Tensor

from verl.algorithms.advantage_groups import top_two
from verl.algorithms.advantage_passes import (
    Sequences,
    count_tokens,
    response_tokens,
    row_blocks,
    sums_from_the_end,
    zero_outside,
)
from verl.algorithms.advantage_types import ADV_ESTIMATORS, AdvantageInputs, Advantages, required

WEIGHT_EPS = 1e-8  # keeps the baseline finite where all weights are zero


@ADV_ESTIMATORS.register("optimal_token_baseline")
@torch.no_grad()
def optimal_token_baseline(inputs: AdvantageInputs) -> Advantages:
    """What a token and those after it earn, beyond the mean of its group at that position, best weighed.

        G_t = sum_{s >= t} r_s
        w_t = (1 - 2 p_t + sum_v p_t(v)**2) * importance_t**2
        W_t = sum_{s <= t} w_s
        B_t = sum_j(G[j,t] W[j,t]) / (sum_j(W[j,t]) + 1e-8)    over the responses j that wrote a token at t
        A_t = G_t - B_t

    All sums go over response tokens. w is the squared norm of the gradient of a token's log-prob with respect
    to the logits: W tells how much a response's start already moves the gradient, and the baseline leans to
    the responses that move it most. The importance weights (trainer over engine) are one by default.

    Past the end of the second longest response of a group there is nothing to compare with: B is 0 there, as
    it is for a response that is alone in its group.

    Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"
    (https://proceedings.mlr.press/v306/li26hy.html), with its logit-gradient proxy for w.

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`, `log_probs`, `sum_squared_probs`
            and, if given, `importance_weights`, (B, R) each.

    Returns:
        Advantages, and returns from before the baseline is taken off.

    Raises:
        ValueError: Shapes differ, or the probabilities are missing.
    """
    kept = response_tokens(inputs)
    places = torch.arange(1, kept.shape[1] + 1, device=kept.device, dtype=torch.float32)
    lengths = torch.zeros_like(kept[:, 0], dtype=torch.float64)  # up to the last token, tool tokens count too
    for rows in row_blocks(kept):
        lengths[rows] = zero_outside(places, kept[rows]).amax(-1).double()
    return _token_baseline(inputs, kept, lengths, "optimal_token_baseline")


@ADV_ESTIMATORS.register("tir_optimal_token_baseline")
@torch.no_grad()
def tir_optimal_token_baseline(inputs: AdvantageInputs) -> Advantages:
    """The optimal token baseline for responses with tool calls: the k-th token that each wrote is compared.

    All as in `optimal_token_baseline`, with t the number of tokens that the policy has written so far and not
    the position: outputs of tools, whose lengths differ, do not shift responses against each other.

    Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"
    (https://proceedings.mlr.press/v306/li26hy.html), tool-integrated reasoning.

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`, `log_probs`, `sum_squared_probs`
            and, if given, `importance_weights`, (B, R) each.

    Returns:
        Advantages, and returns from before the baseline is taken off.

    Raises:
        ValueError: Shapes differ, or the probabilities are missing.
    """
    kept = response_tokens(inputs)
    return _token_baseline(inputs, kept, count_tokens(kept), "tir_optimal_token_baseline")


def _token_baseline(inputs: AdvantageInputs, kept: Tensor, lengths: Tensor, estimator: str) -> Advantages:
    """Compare the responses of a group, place by place, up to the second longest of `lengths` (B,)."""
    by_own_tokens = estimator == "tir_optimal_token_baseline"
    ids, num_tokens = inputs.group_ids, kept.shape[1]
    returns = torch.empty_like(kept, dtype=torch.float32)
    weights = returns.new_zeros(len(torch.bincount(ids)), num_tokens)  # (G, R)
    weighted_returns = torch.zeros_like(weights)
    for rows in row_blocks(kept):
        sums = sums_from_the_end(zero_outside(inputs.token_level_rewards[rows], kept[rows]))
        zero_outside(sums, kept[rows], out=returns[rows])
        weight = _cumulative_weights(inputs, kept, rows, estimator)  # (b, R)
        weighted_return = weight * returns[rows]
        if by_own_tokens:
            weight, weighted_return = compact(weight, kept[rows]), compact(weighted_return, kept[rows])
        weights.index_add_(0, ids[rows], weight)
        weighted_returns.index_add_(0, ids[rows], weighted_return)

    ends = top_two(lengths, Sequences(kept, lengths, lengths, ids)).second  # (G,)
    positions = torch.arange(num_tokens, device=kept.device)
    baselines = torch.where(
        positions < ends.unsqueeze(-1), weighted_returns / (weights + WEIGHT_EPS), 0.0
    )  # (G, R)

    advantages = torch.empty_like(returns)
    for rows in row_blocks(kept):
        baseline = baselines[ids[rows]]  # (b, R)
        if by_own_tokens:
            baseline = spread(baseline, kept[rows])
        zero_outside(returns[rows] - baseline, kept[rows], out=advantages[rows])
    return Advantages(advantages, returns)


def _cumulative_weights(inputs: AdvantageInputs, kept: Tensor, rows: slice, estimator: str) -> Tensor:
    """W_t of some rows, (b, R); zero outside of the response tokens."""
    probs = required(inputs, estimator, "log_probs", like=kept)[rows].exp()
    weights = 1 - 2 * probs + required(inputs, estimator, "sum_squared_probs", like=kept)[rows]
    if inputs.importance_weights is not None:
        weights = weights * required(inputs, estimator, "importance_weights", like=kept)[rows].square()
    return zero_outside(zero_outside(weights, kept[rows]).cumsum(-1), kept[rows])


def compact(values: Tensor, kept: Tensor) -> Tensor:
    """Move the kept values of each row to its start, in their order, zeros behind: (b, R) to (b, R)."""
    num_tokens = kept.shape[1]
    places = torch.where(kept, kept.cumsum(-1) - 1, num_tokens)  # what is not kept goes into one column more
    return values.new_zeros(len(values), num_tokens + 1).scatter_(-1, places, values)[:, :num_tokens]


def spread(values: Tensor, kept: Tensor) -> Tensor:
    """Undo `compact`; what stands outside of the kept tokens means nothing."""
    return values.gather(-1, (kept.cumsum(-1) - 1).clamp(min=0))
