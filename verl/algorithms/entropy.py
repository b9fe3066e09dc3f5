# SPDX-License-Identifier: Apache-2.0
"""Controllers of the entropy bonus: a fixed weight, or one that keeps the entropy from collapsing."""

import math


class FixedEntropyController:
    """Keeps one weight for the whole run; a resumed run uses the weight of its options."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, entropy: float) -> None: ...

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class AdaptiveEntropyController:
    """Gives a bonus only while the entropy is below a target, increasing for as long as it stays there.

        c <- clip(c + delta, minimum, maximum)    after a step with entropy < target
        c <- clip(c - delta, minimum, maximum)    after any other step
        coef = c while the last entropy was below the target, else 0

    Before the first step coef is c.

    Source: Skywork Open Reasoner 1 Technical Report, adaptive entropy control
    (https://arxiv.org/abs/2505.22312).
    """

    def __init__(self, coef: float, target: float, delta: float, maximum: float, minimum: float) -> None:
        if not minimum <= coef <= maximum:
            raise ValueError(
                f"`worker.actor.entropy_coef` ({coef}) must lie between"
                f" `worker.actor.adaptive_entropy.min_entropy_coef` ({minimum}) and"
                f" `worker.actor.adaptive_entropy.max_entropy_coef` ({maximum})"
            )
        self.target, self.delta = target, delta  # nats per token, change per step
        self.maximum, self.minimum = maximum, minimum
        self._reached = coef
        self._is_needed = True

    @property
    def coef(self) -> float:  # 0 disables the bonus
        return self._reached if self._is_needed else 0.0

    def update(self, entropy: float) -> None:  # mean nats per response token
        if math.isnan(entropy):  # all updates of the step were skipped
            return
        self._is_needed = entropy < self.target
        change = self.delta if self._is_needed else -self.delta
        self._reached = min(max(self._reached + change, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self._reached, "entropy_is_needed": float(self._is_needed)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        # The state of a fixed controller is empty: keep the weight of the options.
        self._reached = state.get("entropy_coef", self._reached)
        self._is_needed = bool(state.get("entropy_is_needed", self._is_needed))


EntropyController = FixedEntropyController | AdaptiveEntropyController  # the state belongs in checkpoints
