# SPDX-License-Identifier: Apache-2.0
"""Policy losses: one number for each response token, whose mean falls when good responses become more likely.

To add one: a function from `PolicyLossInputs` to `PolicyLoss`, registered under the name that
`worker.actor.loss_type` selects. The actor aggregates `per_token` (see `aggregation.py`) and logs the mean of
every entry of `statistics` over response tokens as `actor/<name>`, so neither needs a change elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape
from verl.utils.registry import Registry

MAX_LOG_RATIO = 20.0  # exp(20) and its gradient are finite in float32


@dataclass(frozen=True)
class PolicyLossInputs:
    """What losses read. Rows are sequences; padding has `response_mask` 0 and may hold anything, NaN too."""

    log_probs: Tensor  # (B, R) float32, under the weights being trained; carries the gradient
    old_log_probs: Tensor  # (B, R) float32
    advantages: Tensor  # (B, R) float32
    response_mask: Tensor  # (B, R), one on response tokens
    clip_ratio_low: float = 0.2  # the ratio is clipped at 1 - low ...
    clip_ratio_high: float = 0.2  # ... and at 1 + high
    clip_ratio_dual: float = 3.0  # bound on the ratio of tokens with negative advantage


class PolicyLoss(NamedTuple):
    """What losses return."""

    per_token: Tensor  # (B, R); padding holds finite values without gradient
    statistics: dict[str, Tensor]  # name -> (B, R) without gradient; means over response tokens are logged


PolicyLossFunction = Callable[[PolicyLossInputs], PolicyLoss]
POLICY_LOSSES: Registry[PolicyLossFunction] = Registry("worker.actor.loss_type")


@POLICY_LOSSES.register("default")
def ppo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Clipped surrogate loss of PPO, a bound for each side, and a second bound for negative advantages.

        ratio = exp(clamp(log_probs - old_log_probs, -20, 20))
        clipped = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
        L = min(clipped, -A dual)    where A < 0
        L = clipped                  elsewhere

    The gradient is zero where a bound holds; at ratio 1 it is the plain policy gradient -A grad(log_probs).
    `pg_clipfrac_higher` counts tokens whose ratio is clipped (on either side), `pg_clipfrac_lower` tokens
    with negative advantage at the dual bound, `ppo_kl` is -log(ratio), whose mean estimates KL(old || new).

    Source: PPO, equation 7 (https://arxiv.org/abs/1707.06347); unequal bounds: DAPO, section 3.1
    (https://arxiv.org/abs/2503.14476); dual clip: "Mastering Complex Control in MOBA Games", equation 5
    (https://arxiv.org/abs/1912.09729).

    Args:
        inputs: Reads all fields.

    Raises:
        ValueError: Shapes differ.
    """
    log_ratio = clamped_log_ratio(inputs)  # (B, R)
    ratio = log_ratio.exp()
    advantages = inputs.advantages.masked_fill(inputs.response_mask == 0, 0)

    unclipped = -advantages * ratio
    at_bounds = -advantages * ratio.clamp(1 - inputs.clip_ratio_low, 1 + inputs.clip_ratio_high)
    clipped = torch.maximum(unclipped, at_bounds)
    dual_bound = -advantages * inputs.clip_ratio_dual
    is_dual = (advantages < 0) & (clipped > dual_bound)
    per_token = torch.where(is_dual, dual_bound, clipped)

    statistics = {
        "pg_clipfrac_higher": (at_bounds > unclipped).float(),
        "pg_clipfrac_lower": is_dual.float(),
        "ppo_kl": -log_ratio,
    }
    return PolicyLoss(per_token, {name: values.detach() for name, values in statistics.items()})


def clamped_log_ratio(inputs: PolicyLossInputs) -> Tensor:
    """`log_probs - old_log_probs` within +-20; zero, without gradient, outside of the mask. Checks shapes.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(
        log_probs=inputs.log_probs,
        old_log_probs=inputs.old_log_probs,
        advantages=inputs.advantages,
        response_mask=inputs.response_mask,
    )
    log_ratio = (inputs.log_probs - inputs.old_log_probs).masked_fill(inputs.response_mask == 0, 0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
