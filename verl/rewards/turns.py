# SPDX-License-Identifier: Apache-2.0
"""Rewards as numbers; those of turns are further values of a response next to `overall`, their sum."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

PREFIX = "overall/turn_"
NAME = re.compile(re.escape(PREFIX) + r"[1-9]\d*")
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def name_of(number: int) -> str:
    """Name the reward of a turn, counted from 0, among the values of a response."""
    return f"{PREFIX}{number + 1}"


def is_reward_of_turn(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def values_of(rewards: Sequence[float]) -> dict[str, float]:
    """Return the values of a response whose turns have these rewards."""
    by_turn = {name_of(number): reward for number, reward in enumerate(rewards)}
    return {"overall": math.fsum(rewards)} | by_turn


def nearest_float(value: Any) -> float:
    """Return a number, or a truth value of a library such as SymPy, as a float; NaN for anything else."""
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    try:
        if isinstance(value, Real | Decimal):
            return float(value)
        return float(bool(value)) if hasattr(value, "is_Boolean") and value.is_Boolean else math.nan
    except (TypeError, ValueError):  # a relation of symbols is neither true nor false; a signaling NaN
        return math.nan
    except OverflowError:  # an integer or fraction beyond the range of a float
        return math.inf
