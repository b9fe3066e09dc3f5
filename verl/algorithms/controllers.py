# SPDX-License-Identifier: Apache-2.0
"""Controllers of the weights of KL penalty and entropy bonus: fixed, or moved towards a target."""

import math
from dataclasses import dataclass

from verl.config.algorithm import AlgorithmConfig
from verl.config.worker import ActorConfig, AdaptiveEntropyConfig

MAX_RELATIVE_ERROR = 0.2  # the adaptive controller moves the coefficient slowly


class FixedController:
    """Keeps one weight for the whole run; a resumed run uses the weight of its options."""

    def update(self, *_: float, **__: float) -> None: ...

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None: ...


@dataclass
class FixedKLController(FixedController):
    """A fixed weight of the KL penalty."""

    kl_coef: float
    kl_penalty: str | None = "kl"  # a name in `KL_ESTIMATORS`; None: no penalty in the rewards


class AdaptiveKLController:
    """Moves the weight so that the KL approaches a target.

        error = clip(current_kl / target - 1, -0.2, 0.2)
        kl_coef <- kl_coef * (1 + error * n_steps / horizon)

    Source: "Fine-Tuning Language Models from Human Preferences", section 2.2
    (https://arxiv.org/abs/1909.08593).
    """

    def __init__(self, kl_coef: float, target: float, horizon: float, kl_penalty: str = "kl") -> None:
        self.kl_coef = kl_coef
        self.target = target  # nats per token
        self.horizon = horizon  # sequences
        self.kl_penalty: str | None = kl_penalty

    def update(self, current_kl: float, n_steps: int) -> None:  # mean nats per token, sequences
        if math.isnan(current_kl):  # a weight of NaN could never recover
            return
        error = min(max(current_kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.kl_coef *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        # The state of a fixed controller is empty: keep the weight of the options.
        self.kl_coef = state.get("kl_coef", self.kl_coef)


KLController = FixedKLController | AdaptiveKLController  # the state belongs in checkpoints


@dataclass
class FixedEntropyController(FixedController):
    """A fixed weight of the entropy bonus."""

    coef: float


class AdaptiveEntropyController:
    """Gives a bonus only while the entropy is below a target, increasing for as long as it stays there.

        c <- clip(c + delta, minimum, maximum)    after a step with entropy < target
        c <- clip(c - delta, minimum, maximum)    after any other step
        coef = c while the last entropy was below the target, else 0

    Before the first step coef is c, from the minimum to the maximum.

    Source: Skywork Open Reasoner 1 Technical Report, adaptive entropy control
    (https://arxiv.org/abs/2505.22312).
    """

    def __init__(self, coef: float, options: AdaptiveEntropyConfig) -> None:
        self.options = options
        self._reached = coef
        self._is_needed = True

    @property
    def coef(self) -> float:  # 0 disables the bonus
        return self._reached if self._is_needed else 0.0

    def update(self, entropy: float) -> None:  # mean nats per response token
        if math.isnan(entropy):  # all updates of the step were skipped
            return
        options = self.options
        self._is_needed = entropy < options.target_entropy
        change = options.delta_entropy_coef if self._is_needed else -options.delta_entropy_coef
        lowest, highest = options.min_entropy_coef, options.max_entropy_coef
        self._reached = min(max(self._reached + change, lowest), highest)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self._reached, "entropy_is_needed": float(self._is_needed)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        # The state of a fixed controller is empty: keep the weight of the options.
        self._reached = state.get("entropy_coef", self._reached)
        self._is_needed = bool(state.get("entropy_is_needed", self._is_needed))


EntropyController = FixedEntropyController | AdaptiveEntropyController  # the state belongs in checkpoints


def get_kl_controller(algorithm: AlgorithmConfig) -> KLController:
    """Build the controller of the KL weight in the rewards."""
    # `kl_penalty` None means that rewards have no KL term: it is in the loss, or there is none.
    if algorithm.disable_kl or algorithm.use_kl_loss:
        return FixedKLController(0.0, kl_penalty=None)
    if algorithm.kl_type == "adaptive":
        return AdaptiveKLController(
            algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon, algorithm.kl_penalty
        )
    return FixedKLController(algorithm.kl_coef, algorithm.kl_penalty)


def get_entropy_controller(actor: ActorConfig) -> EntropyController:
    if not actor.adaptive_entropy.enabled:
        return FixedEntropyController(actor.entropy_coef)
    return AdaptiveEntropyController(actor.entropy_coef, actor.adaptive_entropy)
