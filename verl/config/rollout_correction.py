# SPDX-License-Identifier: Apache-2.0
"""Parsing of the thresholds and rejections of `algorithm.rollout_correction`, without torch.

The config uses it to find errors, the trainer to apply them; `verl/algorithms/rollout_correction.py` has the
formulas.
"""

import math
from typing import NamedTuple

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
MEASURES = ("k1", "k2", "k3")
REJECTIONS = tuple(
    f"{level}_{measure}" for level in LEVELS for measure in MEASURES if (level, measure) != ("seq_max", "k1")
)
QUOTE = "; quote it in YAML, which otherwise reads 0.5_5 as the number 0.55"


class Bounds(NamedTuple):
    """Bounds of importance weights."""

    lower: float | None  # None: clip at `upper`; otherwise weights outside the bounds become zero
    upper: float


class Rejection(NamedTuple):
    """A criterion to exclude tokens or whole sequences from the loss."""

    level: str  # in LEVELS
    measure: str  # in MEASURES
    lower: float | None  # minimum ratio of k1; k2 and k3 have no lower bound
    upper: float  # maximum ratio of k1, maximum value of k2 and k3

    @property
    def name(self) -> str:
        return f"{self.level}_{self.measure}"


def parse_bounds(text: str, option: str) -> Bounds:
    """Parse the threshold of importance weights: `2.0` clips them at 2, `0.5_5.0` drops weights outside."""
    numbers = _numbers(text)
    if len(numbers) == 1 and numbers[0] >= 1:
        return Bounds(None, numbers[0])
    if len(numbers) == 2 and 0 <= numbers[0] <= 1 <= numbers[1] and numbers[0] < numbers[1]:
        return Bounds(*numbers)
    raise ValueError(
        f"`{option}` must be a number of at least 1 or LOW_HIGH with 1 between, such as 2.0 or 0.5_5.0,"
        f" got {text!r}{QUOTE}"
    )


def parse_rejections(names: str | None, thresholds: str | None, path: str) -> tuple[Rejection, ...]:
    """Parse comma-separated criteria, `seq_mean_k1,seq_max_k3`, and their thresholds, `0.99_1.01,0.5`.

    A threshold of k1 is `LOW_HIGH`, or one number u for `1/u_u`; k2 and k3 take one number. Errors name the
    option in the section `path`.
    """
    option = f"{path}.rollout_rs"
    if names is None:
        if thresholds is not None:
            raise ValueError(f"`{option}_threshold` must be null without `{option}`, got {thresholds!r}")
        return ()
    parts = [part.strip() for part in names.split(",")]
    for part in parts:
        if part not in REJECTIONS:
            raise ValueError(f"`{option}` must hold names of {list(REJECTIONS)}, got {part!r}")
        if parts.count(part) > 1:
            raise ValueError(f"`{option}` must hold each name once, got {part!r} twice")
    texts = [] if thresholds is None else thresholds.split(",")
    if len(texts) != len(parts):
        raise ValueError(
            f"`{option}_threshold` must hold one threshold for each of {parts}, comma-separated,"
            f" got {thresholds!r}"
        )
    return tuple(_rejection(*pair, f"{option}_threshold") for pair in zip(parts, texts, strict=True))


def _rejection(name: str, text: str, option: str) -> Rejection:
    level, measure = name.rsplit("_", 1)
    numbers = _numbers(text)
    if measure == "k1":
        if len(numbers) == 1 and numbers[0] > 1:
            return Rejection(level, measure, 1 / numbers[0], numbers[0])
        if len(numbers) == 2 and 0 < numbers[0] <= 1 <= numbers[1] and numbers[0] < numbers[1]:
            return Rejection(level, measure, *numbers)
        raise ValueError(
            f"`{option}` of {name} must be LOW_HIGH with 1 between, or one number above 1, such as 0.5_2.0"
            f" or 2.0, got {text.strip()!r}{QUOTE}"
        )
    if len(numbers) == 1 and numbers[0] > 0:
        return Rejection(level, measure, None, numbers[0])
    raise ValueError(f"`{option}` of {name} must be one number above 0, got {text.strip()!r}")


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        return []
    return numbers if all(math.isfinite(number) for number in numbers) else []
