# SPDX-License-Identifier: Apache-2.0
"""Calls of a reward function in this process, cut as a run cuts them, timed, and never raising."""

import asyncio
import bdb
import time
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from verl.rewards.function import RewardFunction, Scores, describe, describe_error


class CheckedCall(NamedTuple):
    """One call: what it returned, or why it failed.

    Attributes:
        seconds: How long it took.
        scores: One for each response; none of a call that failed.
        reason: Why it failed, with the line of the reward file.
        error: What the function raised, if it did.
    """

    seconds: float
    scores: list[Scores]
    reason: str | None = None
    error: BaseException | None = None


def split_calls(reward_type: str, groups: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Which responses a function is called with at once.

    Args:
        reward_type: How it is called: `batch`, `sequential` or `dataproto`.
        groups: For each response its group; those of one stand next to each other.
        batch_size: `worker.reward.batch_size`: of a `batch` function; 0 is a group.

    Returns:
        For each call the places of its responses.
    """
    places = list(range(len(groups)))
    if reward_type == "dataproto":
        return [places]
    if reward_type == "sequential":
        return [[place] for place in places]
    if batch_size > 0:
        return [places[start : start + batch_size] for start in range(0, len(places), batch_size)]
    return [list(group) for _, group in groupby(places, key=lambda place: groups[place])]


def check_call(
    reward: RewardFunction, inputs: Sequence[dict[str, Any]], numbers: Sequence[int]
) -> CheckedCall:
    """Call a function once and check what it returns; whatever it raises is the reason of a failure.

    Args:
        reward: The function.
        inputs: What it sees of each response.
        numbers: What errors call the row of each response.

    Raises:
        BdbQuit: The user left the debugger.
    """
    start = time.perf_counter()
    try:
        returned = reward.call(inputs)
        if reward.is_async:
            returned = asyncio.run(returned)
    except bdb.BdbQuit:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's function raises anything)
        reason = f"it raised {describe_error(error, reward.path)}for {describe(numbers, inputs)}"
        return CheckedCall(time.perf_counter() - start, [], reason, error)
    seconds = time.perf_counter() - start
    if reward.reward_type == "sequential":
        returned = [returned]
    try:
        return CheckedCall(seconds, reward.check(returned, numbers, inputs))
    except ValueError as error:
        return CheckedCall(seconds, [], str(error))
