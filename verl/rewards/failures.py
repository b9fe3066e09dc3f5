# SPDX-License-Identifier: Apache-2.0
"""The calls of a batch that failed for good: what their responses count as, and when there are too many.

A failure is no score: the function raised, returned something wrong, was late, or its process died or ran out
of memory. What becomes of the response is `worker.reward.on_failure`.
"""

import json
import math
from pathlib import Path
from typing import Any

from verl.config.worker import RewardConfig
from verl.rewards.function import SHOWN_COLUMNS, Scores
from verl.rewards.pool_process import Call
from verl.rewards.worker_process import Failure
from verl.utils.rank_logger import get_logger

# Columns of a job's result, one number for each response.
FAILURES = "failures"  # 1 where its call failed for good
RETRIES = "retries"  # how often its call was repeated

NUM_REASONS = 3  # that an error shows
REPORTED_COLUMNS = ("uid", *SHOWN_COLUMNS, "response_length")

logger = get_logger(__name__)


class FailedCalls:
    """The failures of one batch.

    Attributes:
        calls: Those that failed for good.
        rows: Their responses, which have no score.
        retries: How often the call of a response was repeated, where it was.
    """

    def __init__(self, config: RewardConfig, log: Path | None) -> None:
        self.calls: list[Call] = []
        self.rows: set[int] = set()
        self.retries: dict[int, int] = {}
        self._config = config
        self._log = log
        self._num_reported = 0

    def add(self, call: Call) -> None:
        """Note a call that failed for good."""
        self.add_retries(call)
        self.calls.append(call)
        self.rows.update(call.rows)

    def add_retries(self, call: Call) -> None:
        """Count how often a call was repeated."""
        repeated = min(len(call.failures), self._config.max_retries)
        if repeated:
            self.retries |= dict.fromkeys(call.rows, repeated)

    def scores(self) -> Scores:
        """What a response counts as: a score, or nan for one that is masked."""
        is_masked = self._config.on_failure == "mask"
        return {"overall": math.nan if is_masked else self._config.failure_score}

    def are_too_many(self, num_responses: int) -> bool:
        """Whether the run should end, for so many responses in the batch."""
        return len(self.rows) > self._config.max_failure_ratio * num_responses

    def reason_to_stop(self, num_responses: int) -> Failure:
        """The error of a batch with too many of them."""
        failed, limit = len(self.rows), self._config.max_failure_ratio
        reasons = "\n\n".join(reason(call) for call in self.calls[:NUM_REASONS])
        return Failure(
            RuntimeError,
            f"the reward function failed for {failed} of {num_responses} responses, more than"
            f" `worker.reward.max_failure_ratio` ({limit:g}) allows. The first reasons:\n\n{reasons}",
        )

    def report(self) -> None:
        """Log what was not reported before, and write each response of it to the file of failures."""
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
                file.writelines(f"{line}\n" for call in new for line in self._lines(call))

    def _lines(self, call: Call) -> list[str]:
        about = {"on_failure": self._config.on_failure, "reasons": [why.message for why in call.failures]}
        return [_as_json(about, row_input) for row_input in call.inputs]


def reason(call: Call) -> str:
    """Why a call failed in the end, and after how many attempts."""
    attempts = f"\n{len(call.failures)} attempts" if len(call.failures) > 1 else ""
    return f"{call.failures[-1].message}{attempts}"


def _as_json(about: dict[str, Any], row_input: dict[str, Any]) -> str:
    columns = {key: row_input[key] for key in REPORTED_COLUMNS if key in row_input}
    return json.dumps(columns | about, default=repr)
