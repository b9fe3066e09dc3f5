# SPDX-License-Identifier: Apache-2.0
"""PRIME's implicit process reward model: a language model whose log-ratio to its start rewards each token.

It is trained on nothing but whether whole responses were right, and scores tokens all the same: the sum of
the log-ratios is the logit of being right, each summand is the reward of its token. The advantages made of
these rewards stand with the other estimators (`prime` in `algorithms/advantages`).

Source: "Process Reinforcement through Implicit Rewards" (https://arxiv.org/abs/2502.01456).
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from verl.utils.masking import check_same_shape, masked_sum


class PrimeLoss(NamedTuple):
    """The loss of each sequence, and the logit that it compares with the accuracy."""

    per_sequence: Tensor  # (B,) nats; zero for a sequence without a response token
    scores: Tensor  # (B,) above zero: the model holds the response to be right


def process_rewards(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """Reward of each response token: how much more likely the model holds it than at its start.

        q[i,t] = beta (log_probs[i,t] - ref_log_probs[i,t])    on response tokens, else zero

    Source: PRIME, section 3.1, equation 3 (https://arxiv.org/abs/2502.01456).

    Args:
        log_probs: Under the process reward model, (B, R), at temperature 1.
        ref_log_probs: Under the weights it started with, (B, R).
        response_mask: (B, R), one on response tokens; what lies outside may hold anything, also NaN.
        beta: Scale, above zero.

    Returns:
        (B, R) float32; the gradient reaches both log-probs.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, response_mask=response_mask)
    log_ratios = log_probs.float() - ref_log_probs.float()
    return beta * log_ratios.masked_fill(response_mask == 0, 0)


def prime_loss(rewards: Tensor, accuracies: Tensor, response_mask: Tensor) -> PrimeLoss:
    """Cross-entropy between whether a response is right and what the model says of it.

        s_i = sum_t q[i,t]
        L_i = -a_i log sigmoid(s_i) - (1 - a_i) log(1 - sigmoid(s_i))

    beta is inside of q already and is not applied again. The gradient of q at every response token is
    sigmoid(s_i) - a_i: all tokens of a response share it. A sequence without a response token has no score
    that could be learned; its loss is zero instead of the constant log 2.

    Source: PRIME, section 3.1, equation 5 (https://arxiv.org/abs/2502.01456).

    Args:
        rewards: q from `process_rewards`, (B, R).
        accuracies: How right each response is, (B,) in [0, 1]; 1 is right.
        response_mask: (B, R), one on response tokens.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(rewards=rewards, response_mask=response_mask)
    check_same_shape(rows_of_mask=response_mask[:, 0], accuracies=accuracies)
    scores = masked_sum(rewards, response_mask, dim=-1)  # (B,)
    losses = F.binary_cross_entropy_with_logits(scores, accuracies.float(), reduction="none")
    return PrimeLoss(losses.masked_fill(~response_mask.any(-1), 0), scores)


def check_accuracies(accuracies: Tensor, key: str) -> None:
    """Refuse accuracies that are no probabilities of being right.

    Args:
        accuracies: (B,), one for each response.
        key: The value of the reward function that they are.

    Raises:
        ValueError: One is outside of [0, 1], or NaN.
    """
    wrong = ~((accuracies >= 0) & (accuracies <= 1))
    if wrong.any():
        raise ValueError(
            f"`algorithm.prime_accuracy_key` ({key}) must name a value of the reward function in [0, 1], got"
            f" {accuracies[wrong][:5].tolist()} in {int(wrong.sum())} of {len(accuracies)} responses: name"
            " another value, or have the function return 1 for a right response and 0 for a wrong one"
        )
