# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: a linear warm-up from 0, then a curve from the peak to `min_lr_ratio` of it.

The curve is lr * (min + (1 - min) * height). To add one, register a function for the height in `SCHEDULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.registry import Registry

if TYPE_CHECKING:  # optimizers are built without a config file too, and need no YAML reader
    from verl.config.model import OptimConfig

SHAPES: dict[str, Callable[[float], float]] = {  # heights by progress, both in [0, 1]
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


class Position(NamedTuple):
    """A step after the warm-up."""

    step: int
    warmup: int  # steps
    total: int  # steps of the run

    def progress(self, start: int) -> float:  # in [0, 1], from `start` or the end of the warm-up
        start = max(start, self.warmup)
        return min(1.0, max(0, self.step - start) / max(1, self.total - start))


SCHEDULES: Registry[Callable[[Position, OptimConfig], float]] = Registry("optim.lr_scheduler_type")


@SCHEDULES.register("constant")
def constant(position: Position, config: OptimConfig) -> float:
    return 1.0


@SCHEDULES.register("linear")
def linear(position: Position, config: OptimConfig) -> float:
    return SHAPES["linear"](position.progress(position.warmup))


@SCHEDULES.register("cosine")
def cosine(position: Position, config: OptimConfig) -> float:
    """Half a cosine. Source: SGDR, equation 5 without restarts (https://arxiv.org/abs/1608.03983)."""
    return SHAPES["cosine"](position.progress(position.warmup))


@SCHEDULES.register("wsd")
def wsd(position: Position, config: OptimConfig) -> float:
    """Warm-up, stable, decay: the peak, then a decay in the last steps of the run.

    Source: MiniCPM, section 4 (https://arxiv.org/abs/2404.06395); the shape `sqrt`: Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations, section 4 (https://arxiv.org/abs/2405.18392).
    """
    # Steps before the decay do not depend on the length of the run, so their checkpoints fit a longer one.
    decay = round(config.lr_decay_ratio * position.total)
    return SHAPES[config.lr_decay_shape](position.progress(position.total - decay))


class WarmupSchedule(LambdaLR):
    """A learning-rate schedule that saves only its position; its shape comes from the config of the run."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        # Rates come from this run's config: a resumed run may change learning rate, groups and curve.
        rates = [
            base * factor(self.last_epoch)
            for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates


def build_scheduler(optimizer: Optimizer, config: OptimConfig, training_steps: int) -> WarmupSchedule:
    """Build the schedule of `optim.lr_scheduler_type`, to be stepped once per training step."""
    height = SCHEDULES[config.lr_scheduler_type]
    warmup = config.lr_warmup_steps  # takes precedence over the ratio
    if warmup is None:
        warmup = int(config.lr_warmup_ratio * training_steps)
    lowest = config.min_lr_ratio or 0.0

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return lowest + (1 - lowest) * height(Position(step, warmup, training_steps), config)

    return WarmupSchedule(optimizer, factor)
