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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import FrameType
from typing import Any

from verl.rewards.graders.answer_text import read, same_text
from verl.utils.processes.child_process import ChildEndedError, ChildProcess
from verl.utils.processes.isolated_calls import IsolatedCalls

TIME_LIMIT_S = 2.0  # of CPU time for one comparison; common ones take milliseconds
WALL_LIMIT_S = 120.0  # for one comparison on the busiest machine; then something is wrong with the machine
ALARM_PERIOD_S = 1.0  # the alarm rings again, in case some `except:` on the way swallowed it
KERNEL_GRACE_S = 2  # CPU time between the alarm and the kernel's limit
MEMORY_LIMIT = 4 << 30  # bytes of address space; symbolic mathematics itself takes a tenth
MAX_ANSWER_LENGTH = 300  # characters; MATH-500 has at most 159, and parsing costs grow with the square
TOKENS = re.compile(r"\\(boxed)\s*+\{|\\.|[{}]", re.DOTALL)  # `\{` is not a brace

_Question = tuple[str, str, float]  # answer, ground truth, limit in seconds of CPU time


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`, with inner braces.

    Of a text without one, the content of the last `\boxed{` that the text's end has cut; None without any.
    """
    closed = (-1, -1)  # start and end of a content
    opened: list[int] = []  # starts of the contents that are open; -1 for braces of no box
    for token in TOKENS.finditer(text):
        if token[1] or token[0] == "{":
            opened.append(token.end() if token[1] else -1)
        elif token[0] == "}" and opened:
            closed = max(closed, (opened.pop(), token.start()))
    start, end = closed if closed[0] >= 0 else (max(opened, default=-1), len(text))
    return text[start:end].strip() if start >= 0 else None


def same_answer(answer: str, ground_truth: str, time_limit_s: float = TIME_LIMIT_S) -> bool:
    r"""Return whether an answer equals the ground truth as text or as mathematics.

    Both are plain text or LaTeX. Case does not matter in words and letters of choices; `B. 12` is the choice
    `B`. A unit may be missing but not be another one. An answer that is too long, or that takes too much
    memory or more than `time_limit_s` seconds of CPU time to decide, is wrong. Thread-safe.
    """
    answer, ground_truth = " ".join(answer.split()), " ".join(ground_truth.split())
    if max(len(answer), len(ground_truth)) > MAX_ANSWER_LENGTH:
        return answer.casefold() == ground_truth.casefold()
    given, truth = read(last_boxed(answer) or answer), read(last_boxed(ground_truth) or ground_truth)
    verdict = same_text(given, truth)
    if verdict is not None:
        return verdict
    try:
        return _comparer(os.getpid())((given.value, truth.value, time_limit_s)).result()
    except ChildEndedError as error:
        if error.exit_code < 0:  # killed by the kernel: too much time or memory
            return False
        raise RuntimeError("the process that compares answers failed; it wrote why to stderr") from error
    except TimeoutError as error:
        raise TimeoutError(f"comparing answers {error}: is this machine too busy?") from error


@cache
def _comparer(pid: int) -> Callable[[_Question], Future[bool]]:
    """Return what compares in this process; a fork does not share its parent's."""
    # A fresh interpreter, because only the child pays for importing SymPy. It dies with the thread that
    # started it, which lives as long as this process.
    calls = IsolatedCalls(_equal, WALL_LIMIT_S, _enter, start=ChildProcess.start)
    return partial(ThreadPoolExecutor(1, "math-answers").submit, calls)


# Everything below runs in the child.


def _enter() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    _lower(resource.RLIMIT_AS, MEMORY_LIMIT)


def _equal(question: _Question) -> bool:
    answer, ground_truth, time_limit_s = question
    from math_verify import verify  # noqa: PLC0415 (takes a second, which only the child should pay)

    _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + time_limit_s) + KERNEL_GRACE_S)
    with suppress(TimeLimitReached, RecursionError, MemoryError), _time_limit(time_limit_s):
        gold, given = _parse(ground_truth), _parse(answer)
        return verify(gold, given, allow_set_relation_comp=True, timeout_seconds=0)
    return False


def _parse(answer: str) -> list[Any]:
    """Parse LaTeX with exact decimals: math-verify rounds to 6 places, and 9.1e-31 would be 1.6e-19."""
    from latex2sympy2_extended import NormalizationConfig  # noqa: PLC0415 (see above)
    from math_verify import LatexExtractionConfig, parse  # noqa: PLC0415
    from sympy import Basic, Float, MatrixBase, Rational  # noqa: PLC0415

    boxed = f"\\boxed{{{answer}}}"
    if last_boxed(boxed) != answer.strip():
        return []  # its braces do not match
    # Units are split off before: math-verify would take the `c` of `ac` for one. Without an anchor it would
    # take any number out of what it cannot read.
    normalization = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="all")
    latex = LatexExtractionConfig(try_extract_without_anchor=False, normalization_config=normalization)
    found = []
    for expression in parse(boxed, [latex], parsing_timeout=0):
        if isinstance(expression, Basic | MatrixBase):
            decimals = {number: Rational(str(number)) for number in expression.atoms(Float)}
            try:
                expression = expression.xreplace(decimals)
            except Exception:  # noqa: BLE001 (SymPy raises anything on nonsense like `1 < 1.5/0.0`)
                continue
        found.append(expression)
    return found


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
