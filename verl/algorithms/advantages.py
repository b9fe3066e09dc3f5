# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators with one advantage per response; `estimators/` has those by token and by turn.

To add one, register a function from `AdvantageInputs` to `Advantages` under the name that
`algorithm.adv_estimator` selects; an input of its own is a new field of `AdvantageInputs` with a default.

In all formulas R_i is the sum of the token rewards of response i. There is no value function here, so the
returns equal the advantages. Rows without a response token are excluded from every mean, deviation and size,
and their advantages are zero.
"""

import torch

from verl.algorithms.advantage_math import (
    STD_EPS,
    broadcast_to_tokens,
    group_mean_std,
    group_sizes,
    group_sums,
    group_z_scores,
    sum_rewards,
    top_two,
    whiten_sequences,
)
from verl.algorithms.advantage_types import ADV_ESTIMATORS, AdvantageInputs, Advantages, require_field
from verl.algorithms.estimators import prime, tokens, turns  # noqa: F401 (registers their estimators)
from verl.utils.masking import check_same_shape


@ADV_ESTIMATORS.register("grpo")
@torch.no_grad()
def grpo(inputs: AdvantageInputs) -> Advantages:
    """Group-relative advantage: the z-score of a return among the responses to the same prompt.

        A_i = (R_i - mean(R_group)) / (std(R_group) + 1e-6)
        A_i =  R_i - mean(R_group)                             when `norm_adv_by_std` is off (Dr. GRPO)

    The standard deviation is unbiased. A lone response keeps its return.

    Source: DeepSeekMath, section 4.1.2 (https://arxiv.org/abs/2402.03300); without the division
    "Understanding R1-Zero-Like Training", section 3.2 (https://arxiv.org/abs/2503.20783).
    """
    sequences = sum_rewards(inputs)
    advantages = group_z_scores(sequences.scores, sequences, inputs.norm_adv_by_std)  # (B,)
    return broadcast_to_tokens(advantages, sequences.kept)


@ADV_ESTIMATORS.register("grpo_passk")
@torch.no_grad()
def grpo_passk(inputs: AdvantageInputs) -> Advantages:
    """Reward only the best response to a prompt, by its lead over the second best: for pass@k.

        A_best = (R_best - R_second) / (std(R_group) + 1e-6)    undivided when `norm_adv_by_std` is off
        A_i    = 0                                              for all others

    Responses that share the best return have no lead.

    Source: "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning", the
    leave-one-out estimate of the best of k (https://arxiv.org/abs/2503.19595).
    """
    sequences = sum_rewards(inputs)
    ids, scores = sequences.group_ids, sequences.scores
    if torch.bincount(ids).eq(1).any():
        raise ValueError(
            "`algorithm.adv_estimator` grpo_passk compares the two best responses to a prompt, and a prompt"
            " has only one: set `worker.rollout.n` to 2 or more"
        )
    first, second = top_two(scores, sequences)  # (G,), (G,)
    is_best = (scores == first[ids]) & (group_sizes(sequences) > 1)
    advantages = torch.where(is_best, scores - second[ids], 0.0)  # (B,)
    if inputs.norm_adv_by_std:
        advantages = advantages / (group_mean_std(scores, sequences)[1] + STD_EPS)
    return broadcast_to_tokens(advantages, sequences.kept)


@ADV_ESTIMATORS.register("rloo")
@torch.no_grad()
def rloo(inputs: AdvantageInputs) -> Advantages:
    """Leave one out: a return minus the mean return of the other responses to the same prompt.

        A_i = R_i - mean_{j != i}(R_j) = n / (n - 1) * (R_i - mean(R_group))

    A lone response keeps its return.

    Source: "Back to Basics: Revisiting REINFORCE Style Optimization", section 3.4
    (https://arxiv.org/abs/2402.14740).
    """
    sequences = sum_rewards(inputs)
    others = group_sizes(sequences) - 1  # (B,)
    distances = group_z_scores(sequences.scores, sequences, divide_by_std=False)
    factors = torch.where(others > 0, 1 + 1 / others.clamp(min=1), 1.0)
    return broadcast_to_tokens(factors * distances, sequences.kept)


@ADV_ESTIMATORS.register("opo")
@torch.no_grad()
def opo(inputs: AdvantageInputs) -> Advantages:
    """On-policy RL with the optimal baseline: the length-weighted mean return of the group.

        A_i = R_i - sum_j(length_j * R_j) / sum_j(length_j)    over the responses j to the same prompt

    This baseline minimizes the variance if the squared gradient of a response's log-prob grows with its
    length in tokens. A lone response keeps its return.

    Source: "On-Policy RL with Optimal Reward Baseline", section 3 (https://arxiv.org/abs/2505.23585).
    """
    sequences = sum_rewards(inputs)
    scores, lengths = sequences.scores, sequences.lengths
    weighted = group_sums(lengths * scores, sequences) / group_sums(lengths, sequences).clamp(min=1)  # (B,)
    baselines = torch.where(group_sizes(sequences) > 1, weighted, 0.0)
    return broadcast_to_tokens(scores - baselines, sequences.kept)


@ADV_ESTIMATORS.register("gpg")
@torch.no_grad()
def gpg(inputs: AdvantageInputs) -> Advantages:
    """Group policy gradient: deviation from the group's mean, scaled up when few responses earn a reward.

        A_i = B / max(number of R_j that are not 0, 1) * (R_i - mean(R_group))

    B counts the responses of the batch, over all prompts. A lone response keeps its scaled return.

    Source: "GPG: A Simple and Strong Reinforcement Learning Baseline", section 3
    (https://arxiv.org/abs/2504.02546); the factor counts responses instead of groups.
    """
    sequences = sum_rewards(inputs)
    factor = (sequences.lengths > 0).sum() / sequences.scores.count_nonzero().clamp(min=1)
    distances = group_z_scores(sequences.scores, sequences, divide_by_std=False)
    return broadcast_to_tokens(factor * distances, sequences.kept)


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline")
@torch.no_grad()
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """Deviation from the group's mean, whitened over the response tokens of the whole batch.

        S_i = R_i - mean(R_group)                      R_i for a lone response
        A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8)    mean and unbiased variance over all response tokens

    Source: "REINFORCE++", the variant with a group baseline (https://arxiv.org/abs/2501.03262).
    """
    sequences = sum_rewards(inputs)
    distances = group_z_scores(sequences.scores, sequences, divide_by_std=False)
    whitened = whiten_sequences(distances, sequences, "reinforce_plus_plus_baseline")
    return broadcast_to_tokens(whitened, sequences.kept)


@ADV_ESTIMATORS.register("gdpo")
@torch.no_grad()
def gdpo(inputs: AdvantageInputs) -> Advantages:
    """Normalize several rewards within their group before adding them, so that none dominates.

        S_i = sum_k weight_k * (c[i,k] - mean(c[group,k])) / (std(c[group,k]) + 1e-6)
        A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8)    mean and unbiased variance over all response tokens

    Undivided by the group's standard deviation when `norm_adv_by_std` is off. A lone response keeps its
    components. The token rewards are not read, so a KL penalty in them has no effect.

    Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization", section 3
    (https://arxiv.org/abs/2601.05242).
    """
    sequences = sum_rewards(inputs)
    components = require_field(inputs, "gdpo", "reward_components")  # (B, K)
    weights = inputs.reward_weights if inputs.reward_weights is not None else torch.ones_like(components[0])
    check_same_shape(rows_of_components=components[:, 0], group_ids=inputs.group_ids)
    check_same_shape(first_components=components[0], reward_weights=weights)
    z_scores = [
        group_z_scores(component.double(), sequences, inputs.norm_adv_by_std)
        for component in components.unbind(-1)
    ]
    total = torch.stack(z_scores, dim=-1) @ weights.double()  # (B,)
    return broadcast_to_tokens(whiten_sequences(total, sequences, "gdpo"), sequences.kept)


@ADV_ESTIMATORS.register("sppo")
@torch.no_grad()
def sppo(inputs: AdvantageInputs) -> Advantages:
    """Deviation from the soft mean of all returns in the batch: the target of self-play preference learning.

        A_i = R_i - 1/beta * log(mean_j(exp(beta * R_j)))    over all responses, whatever their prompt

    The soft mean approaches the mean as beta approaches 0, and the maximum as beta grows.

    Source: "Self-Play Preference Optimization for Language Model Alignment", section 4
    (https://arxiv.org/abs/2405.00675); the soft mean replaces the estimated win rate.
    """
    beta = inputs.softmean_beta
    if beta <= 0:
        raise ValueError(f"`algorithm.sppo_beta` must be above 0, got {beta}")
    sequences = sum_rewards(inputs)
    takes_part = sequences.lengths > 0
    exponents = torch.where(takes_part, beta * sequences.scores, -torch.inf)  # (B,)
    soft_mean = (exponents.logsumexp(0) - takes_part.sum().log()) / beta
    return broadcast_to_tokens(sequences.scores - soft_mean, sequences.kept)
