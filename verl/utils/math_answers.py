# SPDX-License-Identifier: Apache-2.0
"""Whether two mathematical answers are the same, in bounded time: what the shipped reward functions share.

math-verify does the mathematics. Here is what it leaves to the caller: finding the answer, not asking it
about words (it reads `no` as the product n * o, which equals `on`), and a time limit that holds.
"""

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from math_verify import parse, verify

TIME_LIMIT_S = 2.0  # of CPU time for one comparison; common ones take milliseconds
ALARM_PERIOD_S = 1.0  # the alarm rings again, in case some `except:` on the way swallowed it
MAX_ANSWER_LENGTH = (
    300  # characters; the longest answer of MATH-500 has 159, and parsing costs grow with the square
)
BOXED = r"\boxed{"

# It warns that its own time limits are off: the one below replaces them.
logging.getLogger("math_verify").setLevel(logging.ERROR)


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
    r"""Whether an answer equals the ground truth as text or as mathematics.

    Words (two letters or more and nothing else) are equal as text only, whatever their case. An answer that
    is too long, or not decided in time, is wrong. Works in the main thread only, since the limit is a signal.

    Args:
        answer: What the response says, plain or LaTeX, without `$` or `\boxed`.
        ground_truth: What it should say, written in the same way.
        time_limit_s: Seconds of CPU time that parsing and comparing may take together.
    """
    answer, ground_truth = _plain(answer), _plain(ground_truth)
    if answer.casefold() == ground_truth.casefold():
        return answer == ground_truth or _is_word(answer)
    if not answer or _is_word(ground_truth) or _is_word(answer) or len(answer) > MAX_ANSWER_LENGTH:
        return False
    try:
        with time_limit(time_limit_s):
            gold = parse(f"{BOXED}{ground_truth}}}", parsing_timeout=0)
            given = parse(f"{BOXED}{answer}}}", parsing_timeout=0)
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


def _plain(answer: str) -> str:
    """Drop what surrounds an answer and means nothing: spaces, `$`, a final period."""
    return re.sub(r"\s+", " ", answer).strip().strip("$").strip().removesuffix(".")


def _is_word(answer: str) -> bool:
    return len(answer) > 1 and all(part.isalpha() for part in answer.split())
