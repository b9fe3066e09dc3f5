# SPDX-License-Identifier: Apache-2.0
"""How far the policy is from the reference, token by token, and the weight that keeps it near.

To add an estimator: a function of the log-ratio, registered under the name that `algorithm.kl_penalty`
selects. Background: "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape
from verl.utils.registry import Registry

MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32
MAX_LOW_VAR_KL = 10.0  # nats; one outlier token cannot outweigh a batch
MAX_RELATIVE_ERROR = 0.2  # of the adaptive controller: the coefficient moves slowly

KLEstimator = Callable[[Tensor], Tensor]
KL_ESTIMATORS: Registry[KLEstimator] = Registry("algorithm.kl_penalty")


def kl_divergence(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at every response token from the log-probs of the sampled tokens.

    Args:
        log_probs: Under the policy, (B, R).
        ref_log_probs: Under the reference, (B, R).
        response_mask: One on response tokens, (B, R).
        kind: A name in `KL_ESTIMATORS`.

    Returns:
        (B, R), nats; zero and without gradient outside of the mask.

    Raises:
        ValueError: Shapes differ, or the estimator is unknown.
        NotImplementedError: The estimator is `full`.
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, response_mask=response_mask)
    return KL_ESTIMATORS[kind]((log_probs - ref_log_probs).masked_fill(response_mask == 0, 0))


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


@KL_ESTIMATORS.register("full")
def full(log_ratio: Tensor) -> Tensor:
    """The sum over the vocabulary: needs all logits of both models, which never exist here."""
    raise NotImplementedError(
        "`algorithm.kl_penalty` full needs the logits of the whole vocabulary, which are never kept:"
        " use kl, abs, mse or low_var_kl"
    )


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
        """Raise the weight where the KL is above the target, lower it below; `n_steps` in sequences."""
        error = min(max(current_kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.kl_coef *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the weight reached so far."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved weight; the empty state of a fixed controller leaves the options' weight."""
        self.kl_coef = state.get("kl_coef", self.kl_coef)
