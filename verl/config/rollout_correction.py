# SPDX-License-Identifier: Apache-2.0
"""The texts of `algorithm.rollout_correction`'s thresholds and rejections, read without torch.

The config reads them to find errors, the trainer to use them; what the numbers mean stands in
`verl/algorithms/rollout_correction.py`.
"""

import math
from typing import NamedTuple

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
MEASURES = ("k1", "k2", "k3")
REJECTIONS = tuple(
    f"{level}_{measure}" for level in LEVELS for measure in MEASURES if (level, measure) != ("seq_max", "k1")
)
QUOTE = "; in YAML write it in quotes, which otherwise reads 0.5_5 as the number 0.55"


class Bounds(NamedTuple):
    """What importance weights may be."""

    lower: float | None  # None: only cut at `upper`; else weights outside of both become zero
    upper: float


class Rejection(NamedTuple):
    """One reason to leave tokens or whole sequences out of the loss."""

    level: str  # in LEVELS
    measure: str  # in MEASURES
    lower: float | None  # smallest ratio of k1; None for k2 and k3, which have no lower bound
    upper: float  # largest ratio of k1, largest value of k2 and k3

    @property
    def name(self) -> str:
        """As in `REJECTIONS`: `seq_mean_k1`."""
        return f"{self.level}_{self.measure}"


def parse_bounds(text: str, option: str) -> Bounds:
    """Read the threshold of importance weights: `2.0` cuts them at 2, `0.5_5.0` drops those outside.

    Args:
        text: One number, or two with an underscore between.
        option: The option's dotted name, for errors.

    Raises:
        ValueError: It is neither, or the bounds are no interval that can hold a weight of 1.
    """
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
    """Read which tokens and sequences are left out: `seq_mean_k1,seq_max_k3` with `0.99_1.01,0.5`.

    A k1 threshold is `LOW_HIGH`, or one number u for `1/u_u`; k2 and k3 take one number.

    Args:
        names: `rollout_rs`: names in `REJECTIONS` with commas between; None rejects nothing.
        thresholds: `rollout_rs_threshold`: one for each name, with commas between.
        path: Dotted name of the section, for errors.

    Raises:
        ValueError: A name is unknown or given twice, thresholds are missing or too many, or one is wrong.
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
            f"`{option}_threshold` must hold one threshold for each of {parts}, with commas between,"
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
    """The numbers between underscores; none if one of them is not a finite number."""
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        return []
    return numbers if all(math.isfinite(number) for number in numbers) else []
