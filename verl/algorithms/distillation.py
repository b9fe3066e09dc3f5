# SPDX-License-Identifier: Apache-2.0
"""Divergence of a student from its teacher, and rewards from it.

Over the vocabulary it is exact (`verl.models.fused_log_probs.linear_kl`) or over the teacher's top tokens;
on sampled tokens it is an estimator of `kl.py`.
"""

from torch import Tensor

from verl.algorithms.kl import kl_divergence
from verl.utils.masking import check_same_shape


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
