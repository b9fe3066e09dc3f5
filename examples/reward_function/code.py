# SPDX-License-Identifier: Apache-2.0
"""Programs, tested in a sandbox: the last ```python block after `</think>`.

overall = accuracy                  all tests passed, else 0; or passed ** power with `partial: true`

passed                              fraction of the tests that passed
wrong, crashed, timed_out, not_run  fractions of the other tests; without a program all tests are `not_run`
format                              1 if there is a ```python block, else 0

The ground truth holds the tests, in the format of Skywork-OR1, LiveCodeBench, APPS, TACO or MBPP: stdin and
stdout, calls of a function, or assertions (`verl/sandbox/cases.py`). Skywork-OR1's graded reward is
`partial: true, power: 4`. A test may take `cpu_s` seconds of CPU time, all tests of a row `budget_s` seconds;
set `worker.reward.timeout_s` above that. On a machine that cannot isolate programs, none is run and the call
fails.
"""

import re
from typing import Any

from verl.sandbox.outcome import Limits
from verl.sandbox.verdicts import Verdict, VerdictKind, judge

REWARD_NAME = "code"
REWARD_TYPE = "sequential"
OPENING = re.compile(r"```[Pp]ython")


def last_program(response: str) -> str | None:
    """Return the last closed block. Reads every character once, however many blocks are opened."""
    text = response.rpartition("</think>")[2]
    program, end = None, 0
    while opening := OPENING.search(text, end):
        start = text.find("\n", opening.end()) + 1
        end = text.find("```", start)
        if not start or end < 0:
            break
        program, end = text[start:end], end + 3
    return program


def shares(verdicts: list[Verdict]) -> dict[str, float]:
    kinds = [verdict.kind for verdict in verdicts] or [VerdictKind.NOT_RUN]
    return {str(kind): kinds.count(kind) / len(kinds) for kind in VerdictKind}


def compute_score(
    reward_input: dict[str, Any],
    cpu_s: float = 6,
    memory_mb: int = 1024,
    budget_s: float = 60.0,
    partial: bool = False,
    power: float = 1.0,
) -> dict[str, float]:
    program = last_program(reward_input["response"])
    limits = Limits(cpu_s=cpu_s, wall_s=2.5 * cpu_s, memory_mb=memory_mb)
    tests, max_failures = reward_input["ground_truth"], None if partial else 1
    verdicts = []
    if program is not None:
        verdicts = judge(program, tests, limits=limits, max_failures=max_failures, budget_s=budget_s)
    scores = shares(verdicts)
    accuracy = scores["passed"] ** power if partial else float(scores["passed"] == 1.0)
    return {"overall": accuracy, "accuracy": accuracy, "format": float(program is not None), **scores}
