# SPDX-License-Identifier: Apache-2.0
"""Score responses next to the training processes, from the moment a response is finished.

`RewardManager` lives in the controller and owns a pool of processes (pool.py), each of which has loaded the
user's function (worker_process.py, function.py). `RewardJob` scores one batch: responses are submitted as
they finish, and the scores are read at the end.
"""

import json
import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl.config.worker import RewardConfig
from verl.rewards import turns
from verl.rewards.function import SHOWN_COLUMNS, Scores
from verl.rewards.pool import HOPELESS, Batch, Call, RewardPool
from verl.rewards.servers import Specs
from verl.rewards.worker_process import Failure
from verl.utils.processes.serving import taken
from verl.utils.rank_logger import get_logger

Awake = Callable[[], AbstractContextManager[Any]]
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
# Columns of a job's result, one number for each response.
FAILURES = "failures"  # 1 if its call failed for good
RETRIES = "retries"  # how often its call was repeated
NUM_REASONS = 3  # shown in an error
REPORTED_COLUMNS = ("uid", *SHOWN_COLUMNS, "response_length")
Row = tuple[int, dict[str, Any]]  # index of a response in its batch, and what the function sees of it

logger = get_logger(__name__)


class RewardManager(AbstractContextManager["RewardManager"]):
    """The user's reward function, ready to be called in a pool of processes.

    Example::

        with RewardManager(config.worker.reward) as manager:
            job = manager.start()
            job.submit([0], [{"response": "4", "ground_truth": "4"}])
            job.submit([1], [{"response": "5", "ground_truth": "4"}])
            job.result()  # {"overall": [1.0, 0.0]}

    Responses whose call fails without ending the run are appended to `failure_log` as JSON Lines.

    Args:
        servers: Models of the run that the function asks.
        awake: Keeps servers awake inside a block that sleep otherwise; then calls wait for `result`.
    """

    def __init__(
        self,
        config: RewardConfig,
        failure_log: Path | None = None,
        servers: Specs = MappingProxyType({}),
        awake: Awake | None = None,
    ) -> None:
        self.pool = RewardPool(config, servers)
        try:
            ready = self.pool.wait_until_loaded()
        except BaseException:
            self.pool.close()
            raise
        self.name = ready.name
        self.reward_type = ready.reward_type
        self.config, self.failure_log = config, failure_log
        self.waits = awake is not None  # for `result` before any response is scored
        self.awake: Awake = awake or nullcontext

    def start(self) -> "RewardJob":
        """Start scoring a batch. Several may run at the same time."""
        return RewardJob(self)

    def close(self) -> None:
        """Kill the processes. Safe to call twice."""
        self.pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class RewardJob:
    """Scores the responses of one batch."""

    def __init__(self, manager: RewardManager) -> None:
        self._manager, self._pool, self._config = manager, manager.pool, manager.config
        self._reward_type = manager.reward_type
        self._failed = FailedCalls(manager.config, manager.failure_log)
        self._held: list[Row] = []  # not yet handed to the pool
        self._submitted: set[int] = set()
        self._scores: dict[int, Scores] = {}
        self._failure: Failure | None = None  # ends the run
        self._batch = Batch()  # whose finished calls come from the pool

    def submit(self, index: Sequence[int], inputs: Sequence[dict[str, Any]]) -> None:
        """Hand over finished responses and return at once.

        `index` is the position of each response in its batch; `inputs` has the columns of its row, `response`
        and `ground_truth` among them. Raises what `result` would raise for a response submitted before.
        """
        self._collect()
        self._raise_failure()
        assert len(index) == len(inputs), f"{len(index)} positions for {len(inputs)} responses"
        assert self._submitted.isdisjoint(index), f"these responses were submitted before: {index}"
        self._submitted.update(index)
        self._held.extend(zip(index, inputs, strict=True))
        if self._reward_type == "dataproto" or self._manager.waits:  # called by `result`
            return
        size = self._size_of_call
        num_ready = len(self._held) - (len(self._held) % size if size else 0)
        ready, self._held = self._held[:num_ready], self._held[num_ready:]
        self._call(self._divided(ready))

    def result(self) -> dict[str, list[float]]:
        """Wait for all scores, or for a failure that ends the run.

        Each key of the scores has its values, ordered by index; a value that the function did not return is
        nan. If calls were repeated or failed, `retries` and `failures` give their number for each response;
        `overall` of a response whose call failed is `worker.reward.failure_score`, or nan to mask it.

        Raises:
            ValueError: With `on_failure=error`, the function raised or returned something wrong.
            TimeoutError: With `on_failure=error`, a call took longer than `worker.reward.timeout_s`.
            RuntimeError: With `on_failure=error`, a process died; or calls failed for too many responses.
        """
        with self._manager.awake() if self._held else nullcontext():
            held, self._held = sorted(self._held, key=lambda row: row[0]), []
            self._call([held] if self._reward_type == "dataproto" and held else self._divided(held))
            self._collect()
            while not self._is_over():
                self._take(self._batch.finished.get())
        self._failed.report()
        self._raise_failure()
        return self._columns()

    @property
    def _size_of_call(self) -> int:
        """Responses of a call; 0 is whole groups."""
        return 1 if self._reward_type == "sequential" else max(self._config.batch_size, 0)

    def _divided(self, rows: list[Row]) -> list[list[Row]]:
        size = self._size_of_call
        if size:
            return [rows[at : at + size] for at in range(0, len(rows), size)]
        return spread_groups(rows, self._config.num_cpus)

    def _call(self, batches: list[list[Row]]) -> None:
        calls = []
        for batch in batches:
            rows, inputs = [row for row, _ in batch], [row_input for _, row_input in batch]
            calls.append(Call(rows, inputs, pickle_inputs(rows, inputs), self._batch))
        self._pool.submit(calls)

    def _collect(self) -> None:
        for call in taken(self._batch.finished, 0.0):
            self._take(call)

    def _take(self, call: Call) -> None:
        self._failed.count(call)
        if call.scores is not None:
            self._scores.update(zip(call.rows, call.scores, strict=True))
        elif call.is_broken:
            self._end_run(call.failures[-1])
        elif self._config.on_failure == "error":
            message = f"{reason(call)}\n1 of {self._failed.num_calls} finished calls failed"
            self._end_run(call.failures[-1]._replace(message=message))
        else:
            self._failed.add(call)

    def _is_over(self) -> bool:
        too_many = self._failed.reason_to_stop(len(self._submitted))
        if too_many is not None:
            self._end_run(too_many)
        num_finished = len(self._scores) + len(self._failed.rows)
        return self._failure is not None or num_finished == len(self._submitted)

    def _end_run(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self._batch.is_cancelled.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.kind(self._failure.message)

    def _columns(self) -> dict[str, list[float]]:
        failed, retries = self._failed.rows, self._failed.retries
        overall = math.nan if self._config.on_failure == "mask" else self._config.failure_score
        by_row = self._scores | {row: {"overall": overall} for row in failed}
        ordered = [by_row[row] for row in sorted(by_row)]
        columns = columns_of(ordered)
        own = sorted({FAILURES, RETRIES} & set(columns))
        if own:
            raise ValueError(f"the reward function returns {own}, which count its calls: rename them in it")
        if failed or retries:
            columns[FAILURES] = [float(row in failed) for row in sorted(by_row)]
            columns[RETRIES] = [float(retries.get(row, 0)) for row in sorted(by_row)]
        return columns


class FailedCalls:
    """Calls of one batch that failed for good: how their responses count, and when there are too many.

    A failure is not a score: the function raised, returned something wrong or was late, or its process died
    or ran out of memory. `worker.reward.on_failure` says what to do with the response.
    """

    def __init__(self, config: RewardConfig, log: Path | None) -> None:
        self.calls: list[Call] = []
        self.rows: set[int] = set()  # responses of these calls, which have no score
        self.retries: dict[int, int] = {}  # for each response whose call was repeated
        self._config = config
        self._log = log
        self.num_calls = 0  # that have scores or failed
        self._num_reported = 0

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.rows.update(call.rows)

    def count(self, call: Call) -> None:
        self.num_calls += 1
        repeated = min(len(call.failures), self._config.max_retries)
        if repeated:
            self.retries |= dict.fromkeys(call.rows, repeated)

    def reason_to_stop(self, num_responses: int) -> Failure | None:
        """Return the error of a batch of `num_responses` if calls failed for too many of them, or for all."""
        failed, limit = len(self.rows), self._config.max_failure_ratio
        is_everywhere = failed == num_responses and len(self.calls) >= HOPELESS
        if failed <= limit * num_responses and not is_everywhere:
            return None
        reasons = "\n\n".join(reason(call) for call in self.calls[:NUM_REASONS])
        rule = f"more than `worker.reward.max_failure_ratio` ({limit:g}) allows"
        message = (
            f"the reward function failed for {failed} of {num_responses} responses,"
            f" {'which leaves none to learn from' if is_everywhere else rule}; {len(self.calls)} of"
            f" {self.num_calls} finished calls failed. The first reasons:\n\n{reasons}"
        )
        return Failure(RuntimeError, message)

    def report(self) -> None:
        new = self.calls[self._num_reported :]
        if not new:
            return
        self._num_reported = len(self.calls)
        logger.warning(
            "calls of the reward function failed: responses=%d on_failure=%s log=%s first=%s",
            sum(len(call.rows) for call in new),
            self._config.on_failure,
            self._log,
            new[0].failures[-1].message.splitlines()[0],
        )
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as file:
                file.writelines(self._line(call, row_input) for call in new for row_input in call.inputs)

    def _line(self, call: Call, row_input: dict[str, Any]) -> str:
        columns = {key: row_input[key] for key in REPORTED_COLUMNS if key in row_input}
        about = {"on_failure": self._config.on_failure, "reasons": [why.message for why in call.failures]}
        return json.dumps(columns | about, default=repr) + "\n"


def reason(call: Call) -> str:
    number = len(call.failures)
    attempts = f"\nit failed in each of {number} attempts (`worker.reward.max_retries`)" if number > 1 else ""
    return f"{call.failures[-1].message}{attempts}"


def columns_of(scores: Sequence[Scores]) -> dict[str, list[float]]:
    """Turn the scores of responses into columns; a value that a response lacks is nan."""
    keys = {"overall": None} | {key: None for each in scores for key in each}
    return {key: [each.get(key, math.nan) for each in scores] for key in keys}


def spread_groups(rows: list[Row], parts: int) -> list[list[Row]]:
    """Split responses into at most `parts` lists of whole groups, with about as many groups each.

    Consecutive responses with the same `uid` are a group; without `uid` all are one.
    """
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row[1].get("uid"))]
    parts = min(parts, len(groups))
    bounds = [len(groups) * part // parts for part in range(parts + 1)] if parts else []
    return [list(chain.from_iterable(groups[start:end])) for start, end in pairwise(bounds)]


def pickle_inputs(rows: list[int], inputs: list[dict[str, Any]]) -> bytes:
    try:
        return pickle.dumps((rows, inputs), protocol=pickle.HIGHEST_PROTOCOL)
    except UNPICKLABLE as error:
        for row, row_input in zip(rows, inputs, strict=True):
            for key, value in row_input.items():
                _check_picklable(row, key, value, error)
        raise


def _check_picklable(row: int, key: str, value: Any, cause: Exception) -> None:
    try:
        pickle.dumps(value)
    except UNPICKLABLE as error:
        what = f"row {row}: column `{key}` ({type(value).__name__})"
        raise ValueError(f"{what} must be picklable, got: {error}") from cause


class NoRewardFunction:
    """Replaces the manager in a run without a reward function."""

    reward_type = "batch"
    waits = False
    awake: Awake = nullcontext

    def start(self) -> "TurnRewards":
        return TurnRewards()


class TurnRewards:
    """Scores a conversation with the rewards that its turns earned on the way, and any other response 0."""

    def __init__(self) -> None:
        self._scores: dict[int, Scores] = {}  # by the position of the response

    def submit(self, index: Sequence[int], inputs: Sequence[dict[str, Any]]) -> None:
        for row, row_input in zip(index, inputs, strict=True):
            rewards = row_input.get("tool_rewards") or []
            has_reward = any(reward is not None for reward in rewards)
            earned = [0.0 if reward is None else float(reward) for reward in rewards]
            self._scores[row] = turns.values_of(earned if has_reward else [])

    def result(self) -> dict[str, list[float]]:
        return columns_of([self._scores[row] for row in sorted(self._scores)])
