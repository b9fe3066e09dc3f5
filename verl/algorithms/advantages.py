# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: from the rewards of a rollout batch to what each token's log-prob is pushed by.

Here are those that give every token of a response the same advantage; `token_advantages.py`,
`token_baselines.py` and `prime_advantages.py` have those in which a token answers for what comes after it.
To add one: a function from `AdvantageInputs` to `Advantages`, registered under the name that
`algorithm.adv_estimator` selects; an input it needs and others do not is a new field of `AdvantageInputs`
with a default.

In all formulas below R_i is the sum of the rewards over the tokens of response i: where in the response a
reward lies does not matter. There is no value function, so the returns are the advantages. A row without a
response token takes no part in any mean, deviation or size, and its advantages are zero.
"""

import torch

from verl.algorithms.advantage_groups import (
    STD_EPS,
    group_mean_std,
    group_sizes,
    group_sums,
    group_z_scores,
    top_two,
)
from verl.algorithms.advantage_passes import over_tokens, summed_over_tokens, whiten_sequences
from verl.algorithms.advantage_types import (
    ADV_ESTIMATORS,
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    required,
)
from verl.algorithms.prime_advantages import prime
from verl.algorithms.token_advantages import gae, reinforce_plus_plus, remax
from verl.algorithms.token_baselines import optimal_token_baseline, tir_optimal_token_baseline
from verl.utils.masking import check_same_shape

__all__ = [
    "ADV_ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "prime",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sppo",
    "tir_optimal_token_baseline",
]


@ADV_ESTIMATORS.register("grpo")
@torch.no_grad()
def grpo(inputs: AdvantageInputs) -> Advantages:
    """Group-relative advantage: a response's return beside the returns of the other responses to its prompt.

        A_i = (R_i - mean(R_group)) / (std(R_group) + 1e-6)
        A_i =  R_i - mean(R_group)                             when `norm_adv_by_std` is off (Dr. GRPO)

    The standard deviation is the unbiased one. Without the division, questions that are nearly always or
    nearly never answered weigh no more than others. A response that is alone in its group keeps its return:
    mean 0, standard deviation 1.

    Source: DeepSeekMath, section 4.1.2 (https://arxiv.org/abs/2402.03300); without the division
    "Understanding R1-Zero-Like Training", section 3.2 (https://arxiv.org/abs/2503.20783).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`, `norm_adv_by_std`.

    Raises:
        ValueError: Shapes differ.
    """
    sequences = summed_over_tokens(inputs)
    advantages = group_z_scores(sequences.scores, sequences, inputs.norm_adv_by_std)  # (B,)
    return over_tokens(advantages, sequences.kept)


@ADV_ESTIMATORS.register("grpo_passk")
@torch.no_grad()
def grpo_passk(inputs: AdvantageInputs) -> Advantages:
    """Only the best response to a prompt is pushed, by its lead over the second best: for pass@k.

        A_best = (R_best - R_second) / (std(R_group) + 1e-6)    undivided when `norm_adv_by_std` is off
        A_i    = 0                                              for all others

    Responses that share the best return have no lead. Where all responses to a prompt but one have no
    response token, that one has nothing to lead over: zero.

    Source: "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning", the
    leave-one-out estimate of the best of k (https://arxiv.org/abs/2503.19595).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`, `norm_adv_by_std`.

    Raises:
        ValueError: Shapes differ, or a prompt has a single response.
    """
    sequences = summed_over_tokens(inputs)
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
    return over_tokens(advantages, sequences.kept)


@ADV_ESTIMATORS.register("rloo")
@torch.no_grad()
def rloo(inputs: AdvantageInputs) -> Advantages:
    """Leave one out: a response's return beside the mean return of the other responses to its prompt.

        A_i = R_i - mean_{j != i}(R_j) = n / (n - 1) * (R_i - mean(R_group))

    A response that is alone in its group keeps its return.

    Source: "Back to Basics: Revisiting REINFORCE Style Optimization", section 3.4
    (https://arxiv.org/abs/2402.14740).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`.

    Raises:
        ValueError: Shapes differ.
    """
    sequences = summed_over_tokens(inputs)
    others = group_sizes(sequences) - 1  # (B,)
    distances = group_z_scores(sequences.scores, sequences, divide_by_std=False)
    factors = torch.where(others > 0, 1 + 1 / others.clamp(min=1), 1.0)
    return over_tokens(factors * distances, sequences.kept)


@ADV_ESTIMATORS.register("opo")
@torch.no_grad()
def opo(inputs: AdvantageInputs) -> Advantages:
    """On-policy with the optimal baseline: the mean of the group, in which long responses weigh more.

        A_i = R_i - sum_j(length_j * R_j) / sum_j(length_j)    over the responses j to the same prompt

    It is the baseline of least variance if the squared gradient of a response's log-prob grows with its
    length (in response tokens). A response that is alone in its group keeps its return: baseline 0.

    Source: "On-Policy RL with Optimal Reward Baseline", section 3 (https://arxiv.org/abs/2505.23585).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`.

    Raises:
        ValueError: Shapes differ.
    """
    sequences = summed_over_tokens(inputs)
    scores, lengths = sequences.scores, sequences.lengths
    weighted = group_sums(lengths * scores, sequences) / group_sums(lengths, sequences).clamp(min=1)  # (B,)
    baselines = torch.where(group_sizes(sequences) > 1, weighted, 0.0)
    return over_tokens(scores - baselines, sequences.kept)


@ADV_ESTIMATORS.register("gpg")
@torch.no_grad()
def gpg(inputs: AdvantageInputs) -> Advantages:
    """Group policy gradient: distance from the mean of the group, louder the fewer responses earn anything.

        A_i = B / max(number of R_j that are not 0, 1) * (R_i - mean(R_group))

    B counts the responses of the batch, over all prompts. A response that is alone in its group keeps its
    return, times that factor.

    Source: "GPG: A Simple and Strong Reinforcement Learning Baseline", section 3
    (https://arxiv.org/abs/2504.02546); the factor takes single responses for its groups.

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`.

    Raises:
        ValueError: Shapes differ.
    """
    sequences = summed_over_tokens(inputs)
    factor = (sequences.lengths > 0).sum() / sequences.scores.count_nonzero().clamp(min=1)
    distances = group_z_scores(sequences.scores, sequences, divide_by_std=False)
    return over_tokens(factor * distances, sequences.kept)


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline")
@torch.no_grad()
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """Distance from the mean of the group, whitened over the response tokens of the whole batch.

        S_i = R_i - mean(R_group)
        A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8)    mean and unbiased variance over all response tokens

    A response that is alone in its group has S_i = R_i.

    Source: "REINFORCE++", the variant with a group baseline (https://arxiv.org/abs/2501.03262).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`.

    Raises:
        ValueError: Shapes differ, or the batch has less than two response tokens.
    """
    sequences = summed_over_tokens(inputs)
    distances = group_z_scores(sequences.scores, sequences, divide_by_std=False)
    whitened = whiten_sequences(distances, sequences, "reinforce_plus_plus_baseline")
    return over_tokens(whitened, sequences.kept)


@ADV_ESTIMATORS.register("gdpo")
@torch.no_grad()
def gdpo(inputs: AdvantageInputs) -> Advantages:
    """Several rewards, each compared within its group before they are added, so that none drowns another.

        S_i = sum_k weight_k * (c[i,k] - mean(c[group,k])) / (std(c[group,k]) + 1e-6)
        A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8)    mean and unbiased variance over all response tokens

    Undivided by the group's standard deviation when `norm_adv_by_std` is off. A response that is alone in its
    group keeps its components: mean 0, standard deviation 1. The rewards of the tokens are not read: a KL
    penalty inside of them has no effect.

    Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization", section 3
    (https://arxiv.org/abs/2601.05242).

    Args:
        inputs: Reads `response_mask`, `group_ids`, `norm_adv_by_std`, `reward_components` (B, K) and
            `reward_weights` (K,), one each by default.

    Raises:
        ValueError: Shapes differ, the components are missing, or the batch has less than two response tokens.
    """
    sequences = summed_over_tokens(inputs)
    components = required(inputs, "gdpo", "reward_components")  # (B, K)
    weights = inputs.reward_weights if inputs.reward_weights is not None else torch.ones_like(components[0])
    check_same_shape(rows_of_components=components[:, 0], group_ids=inputs.group_ids)
    check_same_shape(first_components=components[0], reward_weights=weights)
    z_scores = [
        group_z_scores(component.double(), sequences, inputs.norm_adv_by_std)
        for component in components.unbind(-1)
    ]
    total = torch.stack(z_scores, dim=-1) @ weights.double()  # (B,)
    return over_tokens(whiten_sequences(total, sequences, "gdpo"), sequences.kept)


@ADV_ESTIMATORS.register("sppo")
@torch.no_grad()
def sppo(inputs: AdvantageInputs) -> Advantages:
    """Distance from the soft mean of all returns of the batch: the target of self-play preference learning.

        A_i = R_i - 1/beta * log(mean_j(exp(beta * R_j)))

    The soft mean goes over all responses of the batch, whatever their prompt. It nears the mean as beta nears
    0 and the largest return as beta grows.

    Source: "Self-Play Preference Optimization for Language Model Alignment", section 4
    (https://arxiv.org/abs/2405.00675); the soft mean stands in for the estimated win rate.

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `softmean_beta`.

    Raises:
        ValueError: Shapes differ, or beta is not positive.
    """
    beta = inputs.softmean_beta
    if beta <= 0:
        raise ValueError(f"`algorithm.sppo_beta` must be above 0, got {beta}")
    sequences = summed_over_tokens(inputs)
    takes_part = sequences.lengths > 0
    exponents = torch.where(takes_part, beta * sequences.scores, -torch.inf)  # (B,)
    soft_mean = (exponents.logsumexp(0) - takes_part.sum().log()) / beta
    return over_tokens(sequences.scores - soft_mean, sequences.kept)
