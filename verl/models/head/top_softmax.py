# SPDX-License-Identifier: Apache-2.0
"""The softmax over a chunk of head products for a few tokens of the vocabulary, and the others as one.

In torch operations on blocks, also on GPUs. For tokens `ids` (M, k), a distribution has k + 1 entries: the
probability of each of these, and the sum over the rest of the vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl.models.head.eager_softmax import blocks, logits_of, overwrite
from verl.models.head.interface import HeadProducts, rows_of


class TopStatistics(NamedTuple):
    """Results for M tokens."""

    log_probs: Tensor  # (M, k + 1)
    lse: Tensor  # (M,)
    rest: Tensor  # (M,): logarithm of the sum of the exponentials of all logits but those of `ids`


class TopGradients(NamedTuple):
    """Gradients of M tokens' results, with the results that they need."""

    log_probs: Tensor  # (M, k + 1), gradient
    lse: Tensor  # (M,)
    rest: Tensor  # (M,)


def write_top_ids(head: HeadProducts, ids: Tensor) -> None:
    """Write the most likely tokens, (M, k) int64."""
    for rows in blocks(head.values):
        z = logits_of(head, rows, torch.promote_types(head.values.dtype, torch.float32))
        ids[rows] = z.topk(ids.shape[1], dim=1).indices


def write_top_log_probs(head: HeadProducts, ids: Tensor, results: TopStatistics) -> None:
    for rows in blocks(head.values):
        log_probs, lse, rest = rows_of(results, rows)
        z = logits_of(head, rows, lse.dtype)
        chosen = z.gather(1, ids[rows])  # (m, k)
        rest.copy_(z.scatter_(1, ids[rows], -math.inf).logsumexp(1))
        lse.copy_(torch.logaddexp(rest, chosen.logsumexp(1)))
        log_probs.copy_(torch.cat([chosen, rest[:, None]], 1) - lse[:, None])


def top_log_prob_gradient(
    head: HeadProducts, ids: Tensor, given: TopGradients, dtype: torch.dtype, grad_bias: Tensor | None
) -> Tensor:
    """Overwrite products with their gradient.

    With g the gradients of the log-probs, g_r that of the rest, and G their sum:
    d / dz_v = g_v - p_v G for a token of `ids`, p_v (g_r / p_r - G) for any other.
    """

    def block_gradient(rows: slice) -> Tensor:
        grads, lse, rest = rows_of(given, rows)
        z = logits_of(head, rows, lse.dtype)
        slope = head.transform.slope(z)
        total = grads.sum(1, keepdim=True)  # (m, 1)
        own = grads[:, :-1] - (z.gather(1, ids[rows]) - lse[:, None]).exp_().mul_(total)  # (m, k)
        gradient = (z - rest[:, None]).exp_().mul_(grads[:, -1:])
        gradient.sub_(z.sub_(lse[:, None]).exp_().mul_(total))
        return gradient.scatter_(1, ids[rows], own).mul_(slope)

    return overwrite(head.values, block_gradient, dtype, grad_bias)
