# SPDX-License-Identifier: Apache-2.0
"""Rewards of the turns of a conversation, as further values of its response next to `overall`, their sum."""

import math
import re
from collections.abc import Sequence

PREFIX = "overall/turn_"
NAME = re.compile(re.escape(PREFIX) + r"[1-9]\d*")


def name_of(number: int) -> str:
    """Name the reward of a turn, counted from 0, among the values of a response."""
    return f"{PREFIX}{number + 1}"


def is_reward_of_turn(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def values_of(rewards: Sequence[float]) -> dict[str, float]:
    """Return the values of a response whose turns have these rewards."""
    by_turn = {name_of(number): reward for number, reward in enumerate(rewards)}
    return {"overall": math.fsum(rewards)} | by_turn
