# SPDX-License-Identifier: Apache-2.0
"""The process in which mathematical answers are compared: what explodes there takes nothing else with it.

It says `ready`, then reads lines `[answer, ground truth, seconds]` and answers each with `true` or `false`.
Three limits, one behind the other: an alarm that Python hears, the kernel's limit of CPU time, which ends the
process even amid one endless multiplication, and the kernel's limit of memory.
"""

import json
import logging
import math
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from math_verify import parse, verify

ALARM_PERIOD_S = 1.0  # the alarm rings again, in case some `except:` on the way swallowed it
KERNEL_GRACE_S = 2  # how much longer the kernel lets it compute
MEMORY_LIMIT = 4 << 30  # bytes of address space; symbolic mathematics itself takes a tenth


def main() -> None:
    """Answer the questions on the standard input until it ends."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's business
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_AS, MEMORY_LIMIT)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    _say(answers, "ready")
    for line in sys.stdin:
        answer, ground_truth, seconds = json.loads(line)
        _lower(resource.RLIMIT_CPU, math.ceil(_cpu_seconds() + seconds) + KERNEL_GRACE_S)
        _say(answers, json.dumps(equal(answer, ground_truth, seconds)))


def equal(answer: str, ground_truth: str, time_limit_s: float) -> bool:
    """Whether two answers in LaTeX, without dollars or box, mean the same; False when it takes too long."""
    try:
        with time_limit(time_limit_s):
            gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=0)
            given = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
            return verify(gold, given, timeout_seconds=0)
    except (TimeLimitReached, RecursionError, MemoryError):
        return False


class TimeLimitReached(BaseException):
    """The time is over. Not an `Exception`, because symbolic mathematics catches those and goes on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitReached` in the block when it computes for longer; in the main thread only.

    CPU time counts, so that a busy machine changes no score; a block that sleeps is not stopped.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeLimitReached

    previous = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, ALARM_PERIOD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _lower(which: int, value: int) -> None:
    """Set a limit that can be raised again, where a lower one is not in force already."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _say(file: TextIO, word: str) -> None:
    file.write(f"{word}\n")
    file.flush()
