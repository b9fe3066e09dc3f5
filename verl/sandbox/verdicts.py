# SPDX-License-Identifier: Apache-2.0
"""Judge a program by tests, each in its own sandbox.

verdicts = judge(source, [{"input": "1 2", "output": "3"}])
verdicts[0].kind     # VerdictKind.PASSED
"""

import json
import math
import re
import time
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from itertools import starmap, zip_longest
from typing import Any

from verl.sandbox.cases import AssertCase, CallCase, Case, StdinCase, read_cases
from verl.sandbox.outcome import Call, Limits, Outcome, SandboxRefusedError, Status
from verl.sandbox.runner import run
from verl.sandbox.values import to_text

PRELUDE = (  # imports that solutions rely on
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys;"
    "from bisect import *; from collections import *; from functools import *; from heapq import *;"
    "from itertools import *; from math import *; from string import *;"
    "from typing import *; from builtins import *; inf = float('inf');"
    "sys.setrecursionlimit(50_000); sys.set_int_max_str_digits(0)"
)
WORD_OR_NEWLINE = re.compile(r"\n|\S+")
# A right output can be longer than the expected one, with more digits or spaces. One that is longer than this
# multiple of it plus this many bytes is wrong, and is not kept.
LONGEST_MULTIPLE, LONGEST_BYTES = 16, 1 << 20
KEPT_CHARACTERS = 1000  # of each text in the outcome of a verdict


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
    outcome: Outcome | None = None  # with the start or the end of its texts; None if it did not run


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

    `tests` are those of a row in any format of `cases.py`. No test starts after
    `max_failures` tests have failed or `budget_s` seconds have passed; a test that runs then times out.
    `limits` apply to each test.

    Raises:
        ValueError: The tests cannot be read.
        SandboxError: The sandbox failed, or no isolation works on this machine (`SandboxRefusedError`).
    """
    verdicts: list[Verdict] = []
    limits, failures, begin = limits or Limits(), 0, time.monotonic()
    for case in read_cases(tests):
        left_s = math.inf if budget_s is None else begin + budget_s - time.monotonic()
        if left_s <= 0 or (max_failures is not None and failures >= max_failures):
            verdicts.append(Verdict(VerdictKind.NOT_RUN))
            continue
        limits_now = replace(limits, wall_s=min(limits.wall_s, left_s))
        verdicts.append(_judge(source, case, limits_now, allow_unsafe))
        failures += verdicts[-1].kind is not VerdictKind.PASSED
    return verdicts


def _judge(source: str, case: Case, limits: Limits, allow_unsafe: bool) -> Verdict:
    call, expected = _asked(case)
    outcome = run(
        source,
        stdin=case.stdin if isinstance(case, StdinCase) else "",
        limits=limits,
        call=call,
        preludes=[PRELUDE, case.prefix] if isinstance(case, AssertCase) else [PRELUDE],
        kept_bytes=LONGEST_BYTES + LONGEST_MULTIPLE * len(expected),
        allow_unsafe=allow_unsafe,
    )
    if outcome.status is Status.REFUSED:
        raise SandboxRefusedError(outcome.detail)
    kinds = {Status.REJECTED: VerdictKind.WRONG, Status.TIMED_OUT: VerdictKind.TIMED_OUT}
    kind = kinds.get(outcome.status, VerdictKind.CRASHED)
    if outcome.status is Status.OK:
        is_right = outcome.value == expected
        if call is None:
            is_right = not outcome.is_stdout_cut and same_output(outcome.stdout, expected)
        kind = VerdictKind.PASSED if is_right else VerdictKind.WRONG
    shown = replace(
        outcome,
        stdout=outcome.stdout[:KEPT_CHARACTERS],
        stderr=outcome.stderr[-KEPT_CHARACTERS:],
        value=outcome.value and outcome.value[:KEPT_CHARACTERS],
    )
    return Verdict(kind, shown)


def _asked(case: Case) -> tuple[Call | None, str]:
    """Return the call that a test makes, and the text that it expects."""
    if isinstance(case, StdinCase):
        return None, case.stdout
    if isinstance(case, CallCase):
        return Call(case.function, json.dumps(case.arguments)), to_text(case.expected, as_json=True)
    return Call(case.expression, None, case.before), to_text(case.expected)


def same_output(output: str, expected: str) -> bool:
    """Compare outputs word by word as text or numbers, ignoring other spaces and empty lines at the end."""
    # Lazily, since an output can have millions of words: the first one that differs decides.
    words, wanted = (
        map(re.Match.group, WORD_OR_NEWLINE.finditer(text.rstrip())) for text in (output, expected)
    )
    return all(starmap(_same_word, zip_longest(words, wanted, fillvalue="")))


def _same_word(word: str, expected: str) -> bool:
    try:
        return word == expected or Decimal(word) == Decimal(expected)
    except InvalidOperation:
        return False
