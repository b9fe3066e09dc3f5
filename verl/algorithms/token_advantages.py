# SPDX-License-Identifier: Apache-2.0
"""Estimators in which a token answers for what comes after it: gae, reinforce_plus_plus, remax.

Tokens inside a response that the policy did not write, as the output of a tool, are passed over: what is
earned after them reaches the tokens before them, undiscounted by them, and they count in no mean. Rewards
that lie on them are lost.
"""

import torch

from verl.algorithms.advantage_passes import (
    discounted_advantages,
    discounted_returns,
    response_tokens,
    row_blocks,
    whiten,
    zero_outside,
)
from verl.algorithms.advantage_types import ADV_ESTIMATORS, AdvantageInputs, Advantages, required


@ADV_ESTIMATORS.register("gae")
@torch.no_grad()
def gae(inputs: AdvantageInputs) -> Advantages:
    """Generalised advantage estimation: what a token earns beyond what the critic expected, whitened.

        delta_t = r_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lam * A_next    V and A after the last response token are 0
        returns = A + V
        A       = (A - mean(A)) / sqrt(var(A) + 1e-8)    mean and unbiased variance over all response tokens

    `next` is the next response token: one step of gamma and lam for each token that the policy wrote.

    Source: "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16
    (https://arxiv.org/abs/1506.02438).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `values`, `gamma`, `lam`.

    Returns:
        Whitened advantages; returns from before the whitening, which the critic learns.

    Raises:
        ValueError: Shapes differ, the values are missing, or the batch has less than two response tokens.
    """
    kept = response_tokens(inputs)
    values = required(inputs, "gae", "values", like=kept)
    advantages = discounted_advantages(inputs.token_level_rewards, values, kept, inputs.gamma, inputs.lam)
    returns = torch.empty_like(advantages)
    for rows in row_blocks(kept):
        zero_outside(advantages[rows] + values[rows], kept[rows], out=returns[rows])
    return Advantages(whiten(advantages, kept, "gae"), returns)


@ADV_ESTIMATORS.register("reinforce_plus_plus")
@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE without a group: what a token and those after it earn, whitened over the batch.

        G_t = r_t + gamma * G_next    G after the last response token is 0
        A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8)    mean and unbiased variance over all response tokens

    Source: "REINFORCE++", section 3 (https://arxiv.org/abs/2501.03262).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `gamma`.

    Returns:
        Whitened advantages; returns from before the whitening.

    Raises:
        ValueError: Shapes differ, or the batch has less than two response tokens.
    """
    kept = response_tokens(inputs)
    returns = discounted_returns(inputs.token_level_rewards, kept, inputs.gamma)
    return Advantages(whiten(returns, kept, "reinforce_plus_plus"), returns)


@ADV_ESTIMATORS.register("remax")
@torch.no_grad()
def remax(inputs: AdvantageInputs) -> Advantages:
    """What a token and those after it earn, beyond the score of the greedy response to the same prompt.

        G_t = sum_{s >= t} r_s    over response tokens
        A_t = G_t - R_greedy

    A group is not needed: one response to each prompt is enough.

    Source: "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models", algorithm 2 (https://arxiv.org/abs/2310.10505).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `reward_baselines` (B,).

    Returns:
        Advantages, and returns from before the baseline is taken off.

    Raises:
        ValueError: Shapes differ, or the baselines are missing.
    """
    kept = response_tokens(inputs)
    baselines = required(inputs, "remax", "reward_baselines", like=inputs.group_ids).float().unsqueeze(-1)
    returns = discounted_returns(inputs.token_level_rewards, kept)
    advantages = torch.empty_like(returns)
    for rows in row_blocks(kept):
        zero_outside(returns[rows] - baselines[rows], kept[rows], out=advantages[rows])
    return Advantages(advantages, returns)
