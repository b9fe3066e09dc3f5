# SPDX-License-Identifier: Apache-2.0
"""KL between policy and reference, or student and teacher: estimators for each token, and exact ones.

To add an estimator, register a function of the log-ratio under the name that `algorithm.kl_penalty` selects,
and list it in the loop below the estimators for a straight-through form `<name>+`.
Background: "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html).

The exact divergence over the vocabulary is `verl.models.fused_log_probs.linear_kl`; `top_kl` is that over the
teacher's top tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape
from verl.utils.registry import Registry

MAX_LOG_RATIO = 20.0  # exp(20) and its gradient are finite in float32
MAX_LOW_VAR_KL = 10.0  # nats; one outlier token cannot outweigh a batch
# Estimators of the KL of whole distributions instead of the log-ratio: over the vocabulary, and of steps.
FULL, FLOW = EXACT = ("full", "flow_grpo")

KLEstimator = Callable[[Tensor], Tensor]
KL_ESTIMATORS: Registry[KLEstimator] = Registry("algorithm.kl_penalty")


class KLLoss(NamedTuple):
    """The KL term of the loss, which keeps the policy near the reference."""

    kind: str  # a name in KL_ESTIMATORS, or "full"
    coef: float  # 0 logs the KL without using it


def kl_divergence(
    log_probs: Tensor,  # (B, R), sampled tokens under the policy
    ref_log_probs: Tensor | None,  # (B, R), under the reference; `full` does not need it
    response_mask: Tensor,  # (B, R), one on response tokens
    kind: str,  # a name in `KL_ESTIMATORS`
    full_kl: Tensor | None = None,  # (B, R), KL over the vocabulary from `linear_kl`; only for `full`
) -> Tensor:
    """KL(policy || reference) at each response token, in nats; zero without gradient outside the mask."""
    estimator = KL_ESTIMATORS[kind]
    check_same_shape(
        log_probs=log_probs, ref_log_probs=ref_log_probs, response_mask=response_mask, full_kl=full_kl
    )
    if kind in EXACT:
        if full_kl is None:
            raise ValueError(
                f"`{KL_ESTIMATORS.option}` {kind} needs the KL over the vocabulary: pass the reference to the"
                " forward pass of the policy"
            )
        return estimator(full_kl.masked_fill(response_mask == 0, 0))
    if ref_log_probs is None:
        raise ValueError(f"`{KL_ESTIMATORS.option}` {kind} needs `ref_log_probs`: run the reference first")
    return estimator((log_probs - ref_log_probs).masked_fill(response_mask == 0, 0))


@KL_ESTIMATORS.register("kl")
def kl(log_ratio: Tensor) -> Tensor:
    """k1: d = log(policy / reference). Unbiased, high variance; as a loss its expected gradient is zero."""
    return log_ratio


@KL_ESTIMATORS.register("abs")
def absolute(log_ratio: Tensor) -> Tensor:
    """|d|: pulls each token's probability towards the reference with constant force."""
    return log_ratio.abs()


@KL_ESTIMATORS.register("mse")
def mse(log_ratio: Tensor) -> Tensor:
    """k2: d**2 / 2. Biased, but its on-policy gradient is that of the KL divergence."""
    return log_ratio.square() / 2


@KL_ESTIMATORS.register("low_var_kl")
def low_var_kl(log_ratio: Tensor) -> Tensor:
    """k3: exp(-d) - 1 + d, unbiased and never negative; -d is clamped to +-20, the result to 10 nats.

    The gradient is zero where a clamp is active. Source: DeepSeekMath, equation 4
    (https://arxiv.org/abs/2402.03300).
    """
    inverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(inverse) - inverse).clamp(max=MAX_LOW_VAR_KL)


@KL_ESTIMATORS.register(FLOW)
@KL_ESTIMATORS.register(FULL)
def full(divergence: Tensor) -> Tensor:
    """sum_v p_v log(p_v / q_v) over the vocabulary, as given: exact value and gradient.

    As `flow_grpo` it is that of a sampler's Gaussians (https://arxiv.org/abs/2505.05470, equation 12).
    """
    return divergence


def straight_through(estimator: KLEstimator) -> KLEstimator:
    """Combine the value of `estimator` with the gradient of k2, on-policy that of the KL divergence.

        k2(d) - sg(k2(d)) + sg(estimator(d))    with sg the stop-gradient

    Source: "On a few pitfalls in KL divergence gradient estimation for RL"
    (https://arxiv.org/abs/2506.09477).
    """

    def with_gradient_of_mse(log_ratio: Tensor) -> Tensor:
        surrogate = mse(log_ratio)
        return estimator(log_ratio).detach() + (surrogate - surrogate.detach())

    return with_gradient_of_mse


for _name, _estimator in (("kl", kl), ("abs", absolute), ("mse", mse), ("low_var_kl", low_var_kl)):
    KL_ESTIMATORS.register(f"{_name}+")(straight_through(_estimator))


def ratio_of(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def top_kl(log_probs: Tensor, teacher_log_probs: Tensor, *, is_forward: bool) -> Tensor:
    """KL divergence over k tokens of the vocabulary, with all others merged into one, in nats.

        forward: sum_v q_v (log q_v - log p_v);    reverse: sum_v p_v (log p_v - log q_v)

    with p of the student and q of the teacher. Merging tokens never raises a KL divergence, so it is at most
    the exact one, and it is not negative. Without the last entry a student could lower the reverse one by
    moving probability to tokens that the teacher finds unlikely.

    Args:
        log_probs: (N, k + 1), of the student; the last entry is that of all other tokens.
        teacher_log_probs: (N, k + 1), of the teacher.
        is_forward: KL(teacher || student), otherwise KL(student || teacher).

    Returns:
        (N,).
    """
    check_same_shape(log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    above, below = (teacher_log_probs, log_probs) if is_forward else (log_probs, teacher_log_probs)
    return (above.exp() * (above - below)).sum(-1)


def distillation_advantages(
    advantages: Tensor,  # (B, R) of the rewards
    log_probs: Tensor,  # (B, R), sampled tokens under the policy that sampled
    teacher_log_probs: Tensor,  # (B, R)
    mask: Tensor,  # (B, R), one on response tokens
    kind: str,  # a name in `KL_ESTIMATORS`
    coef: float,
) -> Tensor:
    """Reward each token for being likely under the teacher: (B, R).

        A[i,t] - coef * kl(log p[i,t] - log q[i,t])

    With `kl` (k1) and a discount of zero this is the policy gradient of the reverse KL divergence.

    Source: On-Policy Distillation, Thinking Machines Lab
    (https://thinkingmachines.ai/blog/on-policy-distillation/).
    """
    check_same_shape(advantages=advantages, mask=mask)
    return advantages - coef * kl_divergence(log_probs, teacher_log_probs, mask, kind)
