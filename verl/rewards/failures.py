# SPDX-License-Identifier: Apache-2.0
"""Calls of a batch that failed for good: how their responses count, and when there are too many.

A failure is not a score: the function raised, returned something wrong or was late, or its process died or
ran out of memory. `worker.reward.on_failure` says what to do with the response.
"""

import json
import math
from pathlib import Path
from typing import Any

from verl.config.worker import RewardConfig
from verl.rewards.function import SHOWN_COLUMNS, Scores
from verl.rewards.pool import HOPELESS, Call
from verl.rewards.worker_process import Failure
from verl.utils.rank_logger import get_logger

# Columns of a job's result, one number for each response.
FAILURES = "failures"  # 1 if its call failed for good
RETRIES = "retries"  # how often its call was repeated

NUM_REASONS = 3  # shown in an error
REPORTED_COLUMNS = ("uid", *SHOWN_COLUMNS, "response_length")

logger = get_logger(__name__)


class FailedCalls:
    """Failures of one batch."""

    def __init__(self, config: RewardConfig, log: Path | None) -> None:
        self.calls: list[Call] = []
        self.rows: set[int] = set()  # responses of these calls, which have no score
        self.retries: dict[int, int] = {}  # for each response whose call was repeated
        self._config = config
        self._log = log
        self._num_calls = 0  # that have scores or failed
        self._num_reported = 0

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.rows.update(call.rows)

    def count(self, call: Call) -> None:
        self._num_calls += 1
        repeated = min(len(call.failures), self._config.max_retries)
        if repeated:
            self.retries |= dict.fromkeys(call.rows, repeated)

    def scores(self) -> Scores:
        """Scores of a response whose call failed; nan masks it."""
        return {"overall": math.nan if self._config.on_failure == "mask" else self._config.failure_score}

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
            f" {self._num_calls} finished calls failed. The first reasons:\n\n{reasons}"
        )
        return Failure(RuntimeError, message)

    def only(self, call: Call) -> str:
        """Describe the call that ends the run with `on_failure=error`."""
        return f"{reason(call)}\n1 of {self._num_calls} finished calls failed"

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
