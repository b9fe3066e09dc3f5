# SPDX-License-Identifier: Apache-2.0
"""How far the policy is from the reference, token by token, and the weight that keeps it near.

To add an estimator: a function of the log-ratio, registered under the name that `algorithm.kl_penalty`
selects; it gets a straight-through form `<name>+` by one more line at the end of the estimators.
Background: "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html).
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape
from verl.utils.registry import Registry

MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32
MAX_LOW_VAR_KL = 10.0  # nats; one outlier token cannot outweigh a batch
MAX_RELATIVE_ERROR = 0.2  # of the adaptive controller: the coefficient moves slowly
FULL = "full"  # the one name that reads the vocabulary's KL and not the sampled tokens' log-ratio

KLEstimator = Callable[[Tensor], Tensor]
KL_ESTIMATORS: Registry[KLEstimator] = Registry("algorithm.kl_penalty")


def kl_divergence(
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    response_mask: Tensor,
    kind: str,
    full_kl: Tensor | None = None,
) -> Tensor:
    """KL(policy || reference) at every response token: estimated from the sampled tokens, or as given.

    Args:
        log_probs: Of the sampled tokens under the policy, (B, R).
        ref_log_probs: Under the reference, (B, R); only `full` does without.
        response_mask: One on response tokens, (B, R).
        kind: A name in `KL_ESTIMATORS`.
        full_kl: Sum over the vocabulary (`verl.models.fused_log_probs.linear_kl`), (B, R); read by `full`.

    Returns:
        (B, R), nats; zero and without gradient outside of the mask.

    Raises:
        ValueError: Shapes differ, the estimator is unknown, or what it reads is missing.
    """
    estimator = KL_ESTIMATORS[kind]
    check_same_shape(
        log_probs=log_probs, ref_log_probs=ref_log_probs, response_mask=response_mask, full_kl=full_kl
    )
    if kind == FULL:
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
    """|d|: pulls every token's probability to the reference's, from both sides, with the same force."""
    return log_ratio.abs()


@KL_ESTIMATORS.register("mse")
def mse(log_ratio: Tensor) -> Tensor:
    """k2: d**2 / 2. Biased value, but on-policy its gradient is that of the KL divergence."""
    return log_ratio.square() / 2


@KL_ESTIMATORS.register("low_var_kl")
def low_var_kl(log_ratio: Tensor) -> Tensor:
    """k3: exp(-d) - 1 + d, never negative, an unbiased value; -d is clamped to +-20, the result to 10 nats.

    Where a clamp binds the gradient is zero. Source: DeepSeekMath, equation 4
    (https://arxiv.org/abs/2402.03300).
    """
    inverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(inverse) - inverse).clamp(max=MAX_LOW_VAR_KL)


@KL_ESTIMATORS.register(FULL)
def full(divergence: Tensor) -> Tensor:
    """The divergence itself, sum_v p_v log(p_v / q_v) over the vocabulary: exact, as is its gradient.

    Costs a forward pass of the reference beside each of the policy, in the loss also at every update.
    """
    return divergence


def straight_through(estimator: KLEstimator) -> KLEstimator:
    """The value of `estimator` with the gradient of k2, which on-policy is that of the KL divergence.

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


class KLController(Protocol):
    """Owns the weight of the KL penalty inside the rewards; its state belongs into checkpoints."""

    kl_coef: float
    kl_penalty: str | None  # a name in `KL_ESTIMATORS`; None: the rewards carry no penalty

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the weight after `n_steps` sequences whose mean KL was `current_kl` nats for each token."""

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""


class FixedKLController:
    """The same weight for the whole run; a resumed run takes the weight that its options give."""

    def __init__(self, kl_coef: float, kl_penalty: str | None = "kl") -> None:
        self.kl_coef = kl_coef
        self.kl_penalty = kl_penalty

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return nothing: the weight is an option."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the weight that the options give."""


class AdaptiveKLController:
    """Moves the weight so that the KL approaches a target.

        error = clip(current_kl / target - 1, -0.2, 0.2)
        kl_coef <- kl_coef * (1 + error * n_steps / horizon)

    Source: "Fine-Tuning Language Models from Human Preferences", section 2.2
    (https://arxiv.org/abs/1909.08593).
    """

    def __init__(self, kl_coef: float, target: float, horizon: float, kl_penalty: str = "kl") -> None:
        """Start from `kl_coef`; `target` in nats for each token, `horizon` in sequences."""
        self.kl_coef = kl_coef
        self.target = target
        self.horizon = horizon
        self.kl_penalty: str | None = kl_penalty

    def update(self, current_kl: float, n_steps: int) -> None:
        """Raise the weight where the KL is above the target, lower it below; `n_steps` in sequences.

        NaN changes nothing: a weight that is not a number could never recover.
        """
        if math.isnan(current_kl):
            return
        error = min(max(current_kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.kl_coef *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the weight reached so far."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved weight; the empty state of a fixed controller leaves the options' weight."""
        self.kl_coef = state.get("kl_coef", self.kl_coef)
