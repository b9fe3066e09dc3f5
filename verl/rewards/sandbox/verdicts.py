# SPDX-License-Identifier: Apache-2.0
"""Judge a program by tests, each in its own sandbox.

verdicts = judge(source, [{"input": "1 2", "output": "3"}])
verdicts[0].kind     # VerdictKind.PASSED
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from itertools import chain
from typing import Any

from verl.rewards.sandbox import values
from verl.rewards.sandbox.cases import AssertCase, CallCase, Case, StdinCase, read_cases
from verl.rewards.sandbox.outcome import Call, Limits, Outcome, SandboxRefusedError, Status
from verl.rewards.sandbox.runner import run

PRELUDE = (  # imports that solutions rely on; on one line, to keep the program's line numbers
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys;"
    "from bisect import *; from collections import *; from functools import *; from heapq import *;"
    "from itertools import *; from math import *; from string import *;"
    "from typing import *; from builtins import *; inf = float('inf');"
    "sys.setrecursionlimit(50_000); sys.set_int_max_str_digits(0)\n"
)


class VerdictKind(StrEnum):
    """Result of one test."""

    PASSED = "passed"
    WRONG = "wrong"  # it ended in time, with another result
    CRASHED = "crashed"  # an exception, an exit code, too much memory or output
    TIMED_OUT = "timed_out"
    NOT_RUN = "not_run"  # enough tests had failed, or the time for all tests was used up


@dataclass(frozen=True)
class Verdict:
    """Result of one test, with the outcome of the program."""

    kind: VerdictKind
    outcome: Outcome | None = None  # None if it did not run


def judge(
    source: str,
    tests: Any,
    *,
    limits: Limits | None = None,
    max_failures: int | None = None,
    budget_s: float | None = None,
    allow_unsafe: bool = False,
) -> list[Verdict]:
    """Run tests one after another, each in a new sandbox, so that none can prepare the next.

    `tests` are those of a row in any format of `cases.py`, or a list of cases. No test starts after
    `max_failures` tests have failed or `budget_s` seconds have passed. `limits` apply to each test.

    Raises:
        ValueError: The tests cannot be read.
        SandboxError: The sandbox failed, or no isolation works on this machine (`SandboxRefusedError`).
    """
    is_read = isinstance(tests, Sequence) and tests and isinstance(tests[0], Case)
    cases = tests if is_read else read_cases(tests)
    verdicts: list[Verdict] = []
    failures, begin = 0, time.monotonic()
    for case in cases:
        is_late = budget_s is not None and time.monotonic() - begin >= budget_s
        if is_late or (max_failures is not None and failures >= max_failures):
            verdicts.append(Verdict(VerdictKind.NOT_RUN))
            continue
        verdicts.append(_judge(source, case, limits or Limits(), allow_unsafe))
        failures += verdicts[-1].kind is not VerdictKind.PASSED
    return verdicts


def _judge(source: str, case: Case, limits: Limits, allow_unsafe: bool) -> Verdict:
    source = _in_front(source, PRELUDE, case.prefix if isinstance(case, AssertCase) else "")
    stdin = case.stdin if isinstance(case, StdinCase) else ""
    outcome = run(source, stdin=stdin, limits=limits, call=_call_of(case), allow_unsafe=allow_unsafe)
    if outcome.status is Status.REFUSED:
        raise SandboxRefusedError(outcome.detail)
    kinds = {Status.REJECTED: VerdictKind.WRONG, Status.TIMED_OUT: VerdictKind.TIMED_OUT}
    if outcome.status is not Status.OK:
        return Verdict(kinds.get(outcome.status, VerdictKind.CRASHED), outcome)
    return Verdict(VerdictKind.PASSED if _is_right(case, outcome) else VerdictKind.WRONG, outcome)


def _in_front(source: str, *parts: str) -> str:
    """Put code before a program, but after its `from __future__` lines."""
    lines = source.split("\n")
    future = [line for line in lines if line.startswith("from __future__ import")]
    rest = [line for line in lines if not line.startswith("from __future__ import")]
    return "\n".join([*future, *(part for part in parts if part), *rest])


def _call_of(case: Case) -> Call | None:
    if isinstance(case, StdinCase):
        return None
    if isinstance(case, CallCase):
        return Call(case.function, json.dumps(case.arguments))
    return Call(case.expression, None, case.before)


def _is_right(case: Case, outcome: Outcome) -> bool:
    if isinstance(case, StdinCase):
        return same_output(outcome.stdout, case.stdout)
    if outcome.value is None:  # it ended before the call returned
        return False
    try:
        value = values.from_text(outcome.value)
    except ValueError:
        return False
    return _plain(value) == _plain(case.expected) if isinstance(case, CallCase) else value == case.expected


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def same_output(output: str, expected: str) -> bool:
    """Compare outputs word by word as text or numbers, ignoring other spaces and empty lines at the end."""
    lines, wanted = ([line.split() for line in text.rstrip().split("\n")] for text in (output, expected))
    if [len(words) for words in lines] != [len(words) for words in wanted]:
        return False
    return all(map(_same_word, chain.from_iterable(lines), chain.from_iterable(wanted)))


def _same_word(word: str, expected: str) -> bool:
    try:
        return word == expected or Decimal(word) == Decimal(expected)
    except InvalidOperation:
        return False
