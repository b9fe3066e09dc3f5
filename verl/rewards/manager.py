# SPDX-License-Identifier: Apache-2.0
"""Scores responses beside the training processes, from the moment a response is finished.

`RewardManager` lives in the controller and owns a pool of processes (pool.py, child.py), each of which has
loaded the user's function (process.py, function.py). `RewardJob` is the responses of one batch: submitted as
they finish, read at the end.
"""

import math
import pickle
import threading
from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

from verl.config.worker import RewardConfig
from verl.rewards.failures import FAILURES, RETRIES, FailedCalls, reason
from verl.rewards.function import OPTION, Scores
from verl.rewards.pool import RewardPool
from verl.rewards.pool_process import Call
from verl.rewards.worker_process import Failure


class RewardManager:
    """The user's reward function, ready to be called in a pool of processes.

    Example::

        with RewardManager(config.worker.reward) as manager:
            job = manager.start()
            job.submit([0], [{"response": "4", "ground_truth": "4"}])
            job.submit([1], [{"response": "5", "ground_truth": "4"}])
            job.result()  # {"overall": [1.0, 0.0]}
    """

    def __init__(self, config: RewardConfig, failure_log: Path | None = None) -> None:
        """Start the pool and wait until the function is loaded.

        Args:
            config: `worker.reward`.
            failure_log: A file to which each response whose call fails is appended, as JSON, unless the
                failure ends the run.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file or its function cannot be used.
            RuntimeError: The process that imported the file died.
            TimeoutError: Importing the file took too long.
        """
        if not config.reward_function:
            raise ValueError(f"`{OPTION}` must be path.py:function, got {config.reward_function!r}")
        self._pool = RewardPool(config.reward_function, config)
        try:
            ready = self._pool.wait_until_loaded()
        except BaseException:
            self._pool.close()
            raise
        self.name = ready.name
        self.reward_type = ready.reward_type
        self._config = config
        self._failure_log = failure_log

    def start(self) -> "RewardJob":
        """Begin to score a batch. Several may be under way."""
        failed = FailedCalls(self._config, self._failure_log)
        return RewardJob(self._pool, self.reward_type, self._config, failed)

    def pids(self) -> list[int]:
        """Process ids of the pool."""
        return self._pool.pids()

    def close(self) -> None:
        """Kill the processes. Safe to call twice."""
        self._pool.close()

    def __enter__(self) -> "RewardManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RewardJob:
    """The responses of one batch on their way to scores."""

    def __init__(self, pool: RewardPool, reward_type: str, config: RewardConfig, failed: FailedCalls) -> None:
        self._pool = pool
        self._reward_type = reward_type
        self._batch_size = config.batch_size
        self._ends_run = config.on_failure == "error"
        self._failed = failed
        self._held: list[tuple[int, dict[str, Any]]] = []  # not yet handed to the pool
        self._submitted: set[int] = set()
        self._scores: dict[int, Scores] = {}
        self._failure: Failure | None = None
        self._changed = threading.Condition()

    @property
    def num_submitted(self) -> int:
        """Responses submitted so far."""
        return len(self._submitted)

    @property
    def num_scored(self) -> int:
        """Responses scored so far."""
        return len(self._scores)

    @property
    def has_failed(self) -> bool:
        """Whether `submit` and `result` raise by now."""
        return self._failure is not None

    def submit(self, index: Sequence[int], inputs: Sequence[dict[str, Any]]) -> None:
        """Hand over finished responses; returns at once.

        A `sequential` function is called for each of them. A `batch` function is called with all of them, or,
        when they are several groups (`uid`), with whole groups spread over the processes; with
        `worker.reward.batch_size` it is called whenever that many have come. A `dataproto` function is called
        once, by `result`.

        Args:
            index: Place of each response in the batch.
            inputs: What the function sees of each: `response`, `response_length`, `ground_truth`, `prompt`
                and the other columns of its row.

        Raises:
            ValueError: With `worker.reward.on_failure=error`, the function raised or returned something wrong
                for a response submitted before.
            TimeoutError: The same, for a call that took too long.
            RuntimeError: The same, for a process that died.
        """
        self._raise_failure()
        assert len(index) == len(inputs), f"{len(index)} places for {len(inputs)} responses"
        assert self._submitted.isdisjoint(index), f"these responses were submitted before: {index}"
        self._submitted.update(index)
        rows = list(zip(index, inputs, strict=True))
        if self._reward_type == "sequential":
            self._call([[row] for row in rows])
        elif self._reward_type == "dataproto":
            self._held.extend(rows)
        elif self._batch_size > 0:
            self._held.extend(rows)
            full = len(self._held) - len(self._held) % self._batch_size
            ready, self._held = self._held[:full], self._held[full:]
            self._call([ready[at : at + self._batch_size] for at in range(0, full, self._batch_size)])
        else:
            self._call(spread_groups(rows, self._pool.num_processes))

    def result(self) -> dict[str, list[float]]:
        """Wait for all scores; released when the last call is over, or by what ends the run.

        Returns:
            For each key of the scores its values, ordered by index; `overall` is always there. A key that the
            function returned for some responses only is nan for the others. Where a call was repeated or
            failed, `retries` and `failures` say for which responses; `overall` of one that failed is nan if
            it is to be masked, and what `worker.reward.failure_score` says if not.

        Raises:
            ValueError: With `worker.reward.on_failure=error`, the function raised or returned something
                wrong; or it returns `retries` or `failures` itself.
            TimeoutError: With `on_failure=error`, a call took longer than `worker.reward.timeout_s`.
            RuntimeError: With `on_failure=error`, a process died; or calls failed for too many responses.
        """
        if self._held:
            held, self._held = self._held, []
            self._call([sorted(held, key=lambda row: row[0])])
        with self._changed:
            self._changed.wait_for(self._is_over)
            if self._failure is None and self._failed.are_too_many(self.num_submitted):
                self._failure = self._failed.reason_to_stop(self.num_submitted)
        self._failed.report()
        self._raise_failure()
        return self._columns()

    def _is_over(self) -> bool:
        if self._failure is not None or self._failed.are_too_many(self.num_submitted):
            return True
        return len(self._scores) + len(self._failed.rows) == self.num_submitted

    def _columns(self) -> dict[str, list[float]]:
        failed, retries = self._failed.rows, self._failed.retries
        by_row = self._scores | dict.fromkeys(failed, self._failed.scores())
        ordered = [by_row[row] for row in sorted(by_row)]
        keys = {"overall": None} | {key: None for scores in ordered for key in scores}
        own = sorted({FAILURES, RETRIES} & set(keys))
        if own:
            raise ValueError(f"the reward function returns {own}, which count its calls: rename them in it")
        columns = {key: [scores.get(key, math.nan) for scores in ordered] for key in keys}
        if failed or retries:
            columns[FAILURES] = [float(row in failed) for row in sorted(by_row)]
            columns[RETRIES] = [float(retries.get(row, 0)) for row in sorted(by_row)]
        return columns

    def _call(self, batches: list[list[tuple[int, dict[str, Any]]]]) -> None:
        calls = []
        for batch in batches:
            rows, inputs = [row for row, _ in batch], [row_input for _, row_input in batch]
            payload = _pickle(rows, inputs)
            calls.append(Call(rows, inputs, payload, self._take_scores, self._take_failure, self._is_wanted))
        self._pool.submit(calls)

    def _take_scores(self, call: Call, scores: list[Scores]) -> None:
        with self._changed:
            self._failed.add_retries(call)
            self._scores.update(zip(call.rows, scores, strict=True))
            self._changed.notify_all()

    def _take_failure(self, call: Call, failure: Failure) -> None:
        with self._changed:
            if failure.is_final:
                self._failure = self._failure or failure
            elif self._ends_run:
                self._failure = self._failure or failure._replace(message=reason(call))
            else:
                self._failed.add(call)
            self._changed.notify_all()

    def _is_wanted(self) -> bool:
        return self._failure is None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.kind(self._failure.message)


def spread_groups(
    rows: list[tuple[int, dict[str, Any]]], parts: int
) -> list[list[tuple[int, dict[str, Any]]]]:
    """Cut responses into at most `parts` runs of whole groups, of about the same number of groups each.

    Responses with the same `uid` next to each other are a group; without `uid` all are one.
    """
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row[1].get("uid"))]
    parts = min(parts, len(groups))
    bounds = [len(groups) * part // parts for part in range(parts + 1)] if parts else []
    return [list(chain.from_iterable(groups[start:end])) for start, end in pairwise(bounds)]


def _pickle(rows: list[int], inputs: list[dict[str, Any]]) -> bytes:
    try:
        return pickle.dumps((rows, inputs), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        for row, row_input in zip(rows, inputs, strict=True):
            for key, value in row_input.items():
                _check_picklable(row, key, value, error)
        raise


def _check_picklable(row: int, key: str, value: Any, cause: Exception) -> None:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"row {row}: column `{key}` ({type(value).__name__}) must be picklable, got: {error}"
        ) from cause


class NoRewardFunction:
    """Stands where the reward function would, in a run that is scored by a reward model alone."""

    reward_type = "batch"

    def start(self) -> "ZeroScores":
        """Begin a batch."""
        return ZeroScores()


class ZeroScores:
    """A job whose responses score nothing."""

    def __init__(self) -> None:
        self._num_responses = 0

    def submit(self, index: Sequence[int], inputs: Sequence[dict[str, Any]]) -> None:
        """Count responses."""
        self._num_responses += len(index)

    def result(self) -> dict[str, list[float]]:
        """Return `overall` 0 for each."""
        return {"overall": [0.0] * self._num_responses}
