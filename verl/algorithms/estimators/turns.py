# SPDX-License-Identifier: Apache-2.0
"""Estimators with an advantage per turn of a conversation, which all tokens of the turn share.

The reward of a turn is the sum of the rewards of its tokens, a KL penalty among them. A turn without a token
that counts is skipped, as if the conversation did not have it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantage_math import (
    Sequences,
    by_rows,
    discounted_advantages,
    group_z_scores,
    response_tokens,
    row_blocks,
    sum_rewards,
    whiten,
    zero_outside,
)
from verl.algorithms.advantage_types import ADV_ESTIMATORS, AdvantageInputs, Advantages, require_field


class Turns(NamedTuple):
    """Sums over the tokens of each turn, in columns by its number; K is one more than the largest number."""

    kept: Tensor  # (B, R) bool, the response tokens
    ids: Tensor  # (B, R) int64, the number of each response token's turn
    rewards: Tensor  # (B, K) float64
    lengths: Tensor  # (B, K) float64, response tokens


@ADV_ESTIMATORS.register("turn_grpo")
@torch.no_grad()
def turn_grpo(inputs: AdvantageInputs) -> Advantages:
    """Group-relative advantage of each turn: the z-score of its return among the turns with its number.

        G[i,k] = r[i,k] + turn_gamma * G[i,k+1]
        A[i,k] = (G[i,k] - mean(G[group,k])) / (std(G[group,k]) + 1e-6)
        A[i,k] =  G[i,k] - mean(G[group,k])                  when `norm_adv_by_std` is off

    The group has the responses to the same prompt that have a turn k. The standard deviation is unbiased. A
    lone turn keeps its return. With one turn this is `grpo`.

    Source: credit by turn as in "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design"
    (https://arxiv.org/abs/2505.11821); here later rewards are added before the normalization.
    """
    turns = sum_turns(inputs, "turn_grpo")
    returns = _returns_to_go(turns, inputs.turn_gamma)  # (B, K)
    num_turns = returns.shape[1]
    numbers = torch.arange(num_turns, device=returns.device)  # (K,)
    group_ids = inputs.group_ids.unsqueeze(-1) * num_turns + numbers  # (B, K)
    flat = Sequences(turns.kept, returns.flatten(), turns.lengths.flatten(), group_ids.flatten())
    z_scores = group_z_scores(flat.scores, flat, inputs.norm_adv_by_std)  # (B * K,)
    advantages = on_tokens(z_scores.view_as(returns), turns)
    return Advantages(advantages, returns=advantages)


@ADV_ESTIMATORS.register("turn_gae")
@torch.no_grad()
def turn_gae(inputs: AdvantageInputs) -> Advantages:
    """Generalized advantage estimation with turns as its steps, whitened over all response tokens.

        delta_k = r_k + turn_gamma * V_{k+1} - V_k        V_k is the critic's value at the turn's first token
        A_k     = delta_k + turn_gamma * lam * A_{k+1}    V and A after the last turn are 0
        returns = A_k + V_k                               at every token of the turn; the critic's target
        A       = (A - mean(A)) / sqrt(var(A) + 1e-8)     mean and unbiased variance over all response tokens

    The value at a token is estimated before it, so V_k knows nothing of turn k. With turns of one token this
    is `gae`.

    Source: "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16
    (https://arxiv.org/abs/1506.02438), where a turn is an action.
    """
    turns = sum_turns(inputs, "turn_gae")
    values = _first_values(require_field(inputs, "turn_gae", "values", like=turns.kept), turns)  # (B, K)
    advantages = discounted_advantages(
        turns.rewards.float(), values, turns.lengths > 0, inputs.turn_gamma, inputs.lam
    )  # (B, K)
    returns = on_tokens(advantages + values, turns)
    return Advantages(whiten(on_tokens(advantages, turns), turns.kept, "turn_gae"), returns)


def sum_turns(inputs: AdvantageInputs, estimator: str) -> Turns:
    """Sum the rewards of each turn and count its tokens."""
    kept = response_tokens(inputs)
    ids = zero_outside(require_field(inputs, estimator, "turn_ids", like=kept), kept)
    num_turns = int(ids.max()) + 1
    if num_turns == 1:  # in the order of other estimators, so that results are equal to the last bit
        whole = sum_rewards(inputs)
        return Turns(kept, ids, whole.scores.unsqueeze(-1), whole.lengths.unsqueeze(-1))
    rewards = inputs.token_level_rewards.new_zeros(len(kept), num_turns, dtype=torch.float64)
    lengths = torch.zeros_like(rewards)
    for rows in row_blocks(kept):
        earned = zero_outside(inputs.token_level_rewards[rows], kept[rows])  # (b, R)
        rewards[rows] = rewards[rows].scatter_add(-1, ids[rows], earned.double())
        lengths[rows] = lengths[rows].scatter_add(-1, ids[rows], kept[rows].double())
    return Turns(kept, ids, rewards, lengths)


def on_tokens(values: Tensor, turns: Turns) -> Tensor:
    """Give every response token its turn's value, (B, R) float32 from (B, K)."""
    return by_rows(lambda columns, ids: columns.gather(-1, ids), turns.kept, values.float(), turns.ids)


def _returns_to_go(turns: Turns, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each turn to the last one, (B, K) float64."""
    returns = torch.empty_like(turns.rewards)
    later = torch.zeros_like(turns.rewards[:, 0])  # (B,)
    for number in reversed(range(returns.shape[1])):
        total = turns.rewards[:, number] + gamma * later
        later = torch.where(turns.lengths[:, number] > 0, total, later)
        returns[:, number] = total
    return returns


def _first_values(values: Tensor, turns: Turns) -> Tensor:
    """Read per-token values (B, R) at each turn's first token, (B, K); meaningless for a turn without one."""
    num_tokens = values.shape[1]
    positions = torch.arange(num_tokens, device=values.device)
    found = torch.empty_like(turns.rewards, dtype=values.dtype)
    for rows in row_blocks(values):
        kept, ids = turns.kept[rows], turns.ids[rows]
        firsts = torch.full_like(turns.rewards[rows], num_tokens - 1, dtype=torch.int64)  # (b, K)
        firsts = firsts.scatter_reduce(-1, ids, torch.where(kept, positions, num_tokens), "amin")
        found[rows] = values[rows].gather(-1, firsts)
    return found
