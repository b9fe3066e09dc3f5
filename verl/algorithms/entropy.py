# SPDX-License-Identifier: Apache-2.0
"""The weight of the entropy bonus in the policy loss: fixed, or steered so that entropy does not collapse.

To add one: a class with the methods of `EntropyController`.
"""

import math
from typing import Protocol


class EntropyController(Protocol):
    """Owns the weight of the entropy bonus; its state belongs into checkpoints."""

    @property
    def coef(self) -> float:
        """The weight to use now; 0 is no bonus."""
        ...

    def update(self, entropy: float) -> None:
        """Adapt the weight after a step whose mean entropy was `entropy` nats for each response token."""

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""


class FixedEntropyController:
    """The same weight for the whole run; a resumed run takes the weight that its options give."""

    def __init__(self, coef: float) -> None:
        self._coef = coef

    @property
    def coef(self) -> float:
        """The weight that the options give."""
        return self._coef

    def update(self, entropy: float) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return nothing: the weight is an option."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the weight that the options give."""


class AdaptiveEntropyController:
    """Gives a bonus only while entropy is below a target, the larger the longer that lasts.

        c <- clip(c + delta, minimum, maximum)    after a step with entropy < target
        c <- clip(c - delta, minimum, maximum)    after any other step
        coef = c while the last entropy was below the target, else 0

    Before the first step, whose entropy nobody knows yet, coef is c.

    Source: Skywork Open Reasoner 1 Technical Report, adaptive entropy control
    (https://arxiv.org/abs/2505.22312).
    """

    def __init__(self, coef: float, target: float, delta: float, maximum: float, minimum: float) -> None:
        """Start from c = `coef`; `target` in nats for each token, `delta` is the change in one step.

        Raises:
            ValueError: `minimum` is above `maximum`, or `coef` is outside of the two.
        """
        if not minimum <= coef <= maximum:
            raise ValueError(
                f"`worker.actor.entropy_coef` ({coef}) must lie between"
                f" `worker.actor.adaptive_entropy.min_entropy_coef` ({minimum}) and"
                f" `worker.actor.adaptive_entropy.max_entropy_coef` ({maximum})"
            )
        self.target, self.delta, self.maximum, self.minimum = target, delta, maximum, minimum
        self._reached = coef
        self._is_needed = True

    @property
    def coef(self) -> float:
        """The weight to use now."""
        return self._reached if self._is_needed else 0.0

    def update(self, entropy: float) -> None:
        """Raise the weight if `entropy` is below the target, else lower it and pause the bonus.

        NaN, the entropy of a step whose updates were all skipped, changes nothing.
        """
        if math.isnan(entropy):
            return
        self._is_needed = entropy < self.target
        change = self.delta if self._is_needed else -self.delta
        self._reached = min(max(self._reached + change, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, float]:
        """Return the weight reached so far, and whether it is in use (1) or paused (0)."""
        return {"entropy_coef": self._reached, "entropy_is_needed": float(self._is_needed)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved weight; the empty state of a fixed controller leaves the options' weight."""
        self._reached = state.get("entropy_coef", self._reached)
        self._is_needed = bool(state.get("entropy_is_needed", self._is_needed))
