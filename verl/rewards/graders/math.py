# SPDX-License-Identifier: Apache-2.0
"""Compare mathematical answers in bounded time, for the shipped reward functions.

math-verify does the mathematics, in a child process with three limits: an alarm that Python hears, the
kernel's limit of CPU time, which holds even inside one endless multiplication, and its limit of memory.
"""

import logging
import math
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import NamedTuple

from verl.utils.child_process import ChildEndedError, ChildProcess, IsolatedCalls

TIME_LIMIT_S = 2.0  # of CPU time for one comparison; common ones take milliseconds
WALL_LIMIT_S = 120.0  # for one comparison on the busiest machine; then something is wrong with the machine
ALARM_PERIOD_S = 1.0  # the alarm rings again, in case some `except:` on the way swallowed it
KERNEL_GRACE_S = 2  # CPU time between the alarm and the kernel's limit
MEMORY_LIMIT = 4 << 30  # bytes of address space; symbolic mathematics itself takes a tenth
MAX_ANSWER_LENGTH = 300  # characters; MATH-500 has at most 159, and parsing costs grow with the square
BOXED = r"\boxed{"

_Question = tuple[str, str, float]  # answer, ground truth, limit in seconds of CPU time


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`, with inner braces; None when there is none."""
    start = text.rfind(BOXED)
    while start >= 0:
        depth = 1
        for end in range(start + len(BOXED), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(BOXED) : end].strip()
        start = text.rfind(BOXED, 0, start)
    return None


def same_answer(answer: str, ground_truth: str, time_limit_s: float = TIME_LIMIT_S) -> bool:
    r"""Return whether an answer equals the ground truth as text or as mathematics.

    Both are plain text or LaTeX. Words (two or more letters and nothing else) are compared as text, ignoring
    case. An answer that is too long, or that takes too much memory or more than `time_limit_s` seconds of CPU
    time to decide, is wrong. Thread-safe.
    """
    answer, ground_truth = _plain(answer), _plain(ground_truth)
    if answer.casefold() == ground_truth.casefold():
        return answer == ground_truth or _is_word(answer)
    # Words: math-verify reads `no` as the product n * o, which equals `on`.
    if not answer or _is_word(ground_truth) or _is_word(answer) or len(answer) > MAX_ANSWER_LENGTH:
        return False
    comparer = _comparer(os.getpid())
    try:
        return comparer.thread.submit(comparer.equal, (answer, ground_truth, time_limit_s)).result()
    except ChildEndedError as error:
        if error.exit_code < 0:  # killed by the kernel: too much time or memory
            return False
        raise RuntimeError("the process that compares answers failed; it wrote why to stderr") from error
    except TimeoutError as error:
        raise TimeoutError(f"comparing answers {error}: is this machine too busy?") from error


def _plain(answer: str) -> str:
    return re.sub(r"\s+", " ", answer).strip().strip("$").strip().removesuffix(".")


def _is_word(answer: str) -> bool:
    return len(answer) > 1 and all(part.isalpha() for part in answer.split())


class _Comparer(NamedTuple):
    equal: IsolatedCalls[_Question, bool]
    thread: ThreadPoolExecutor  # one, which lives as long as this process: the child dies with its thread


@cache
def _comparer(pid: int) -> _Comparer:
    """Return the comparer of this process; a fork does not share its parent's."""
    # A fresh interpreter, because only the child pays for importing SymPy.
    calls = IsolatedCalls(_equal, WALL_LIMIT_S, _enter, start=ChildProcess.start)
    return _Comparer(calls, ThreadPoolExecutor(1, "math-answers"))


# Everything below runs in the child.


def _enter() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    _lower(resource.RLIMIT_AS, MEMORY_LIMIT)


def _equal(question: _Question) -> bool:
    answer, ground_truth, time_limit_s = question
    from math_verify import parse, verify  # noqa: PLC0415 (takes a second, which only the child should pay)

    _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + time_limit_s) + KERNEL_GRACE_S)
    try:
        with _time_limit(time_limit_s):
            gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=0)
            given = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
            return verify(gold, given, timeout_seconds=0)
    except (TimeLimitReached, RecursionError, MemoryError):
        return False


class TimeLimitReached(BaseException):
    """The time is over. Not an `Exception`, because SymPy catches those and continues."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitReached` in a block that uses more CPU time; in the main thread only."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeLimitReached

    previous = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, ALARM_PERIOD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _lower(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
