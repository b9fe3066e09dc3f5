# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of the softmax over a chunk of head products.

`eager_softmax` computes it in torch operations, `triton_softmax` in kernels that read a chunk once.
"""

from typing import NamedTuple, TypeVar

from torch import Tensor

from verl.models.head.logit_chunks import LogitTransform

Columns = TypeVar("Columns", bound=NamedTuple)


class HeadProducts(NamedTuple):
    """Products of M tokens with a head's weight, and the bias and transform that make them logits."""

    values: Tensor  # (M, V), a contiguous part of a chunk
    bias: Tensor | None  # (V,)
    transform: LogitTransform


class LogProbStatistics(NamedTuple):
    """Results for M tokens, (M,) each; None where not requested."""

    log_probs: Tensor  # of the targets
    lse: Tensor  # logarithm of the sum of the exponentials of all logits
    entropy: Tensor | None
    sum_squares: Tensor | None  # of the probabilities


class LogProbGradients(NamedTuple):
    """Gradients of M tokens' results, (M,) each, with the results that they need."""

    lse: Tensor
    log_probs: Tensor  # gradient
    entropy: Tensor | None  # value; None if the entropy has no gradient
    grad_entropy: Tensor | None


class KLStatistics(NamedTuple):
    """The KL divergence of M tokens, (M,) each, with p of the policy and q of the reference."""

    kl: Tensor  # below zero only by rounding
    lse: Tensor  # of the policy
    mean_gap: Tensor  # sum over the vocabulary of p (policy's logit - reference's logit)
    ref_lse: Tensor | None = None  # of the reference, if requested


class KLGradients(NamedTuple):
    """Gradients of M tokens' divergence, (M,) each, with the statistics that they need.

    KL(policy || reference) needs `mean_gap`, KL(reference || policy) `ref_lse`; the other one is None.
    """

    lse: Tensor  # of the policy
    kl: Tensor  # gradient
    mean_gap: Tensor | None = None
    ref_lse: Tensor | None = None


def rows_of(columns: Columns, rows: slice) -> Columns:
    """Return the same named tuple of some of the tokens."""
    return columns._make(None if column is None else column[rows] for column in columns)
