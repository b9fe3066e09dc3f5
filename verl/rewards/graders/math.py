# SPDX-License-Identifier: Apache-2.0
"""Whether two mathematical answers are the same, in bounded time: what the shipped reward functions share.

math-verify does the mathematics. Here is what it leaves to the caller: finding the answer, not asking it
about words (it reads `no` as the product n * o, which equals `on`), and limits that hold. The mathematics
runs in a process of its own (`math_process.py`), which the kernel ends when it computes for too long.
"""

import json
import os
import re
import select
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache

TIME_LIMIT_S = 2.0  # of CPU time for one comparison; common ones take milliseconds
WALL_LIMIT_S = 120.0  # for one comparison on the busiest machine; then something is wrong with the machine
MAX_ANSWER_LENGTH = (
    300  # characters; the longest answer of MATH-500 has 159, and parsing costs grow with the square
)
BOXED = r"\boxed{"

BOOT = "from verl.rewards.graders.math_process import main; main()"


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
    is too long, or that mathematics does not decide within its time and memory, is wrong. Any thread may ask.

    Args:
        answer: What the response says, plain or LaTeX, without `$` or `\boxed`.
        ground_truth: What it should say, written in the same way.
        time_limit_s: Seconds of CPU time that parsing and comparing may take together.

    Raises:
        RuntimeError: The process that compares does not start. TimeoutError: It does nothing.
    """
    answer, ground_truth = _plain(answer), _plain(ground_truth)
    if answer.casefold() == ground_truth.casefold():
        return answer == ground_truth or _is_word(answer)
    if not answer or _is_word(ground_truth) or _is_word(answer) or len(answer) > MAX_ANSWER_LENGTH:
        return False
    return _comparer(os.getpid()).ask(answer, ground_truth, time_limit_s)


@cache
def _comparer(pid: int) -> "_Comparer":
    """The comparing process of this process; a fork does not share its parent's."""
    return _Comparer()


class _Comparer:
    """A process that compares answers, one after another; started when needed, and again when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, answer: str, ground_truth: str, time_limit_s: float) -> bool:
        with self._lock:
            process = self._running()
            question = json.dumps([answer, ground_truth, time_limit_s])
            with suppress(BrokenPipeError):  # it is gone, and the next line says so
                self._write_line(process, question)
            line = self._read_line(process)
            if not line and process.returncode > 0:
                raise RuntimeError("the process that compares answers failed; it wrote why to stderr")
            return line == "true\n"  # none when a signal ended the process: too much time or memory

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            if self._read_line(self._process) != "ready\n":
                raise RuntimeError("the process that compares answers did not start; it wrote why to stderr")
        return self._process

    def _write_line(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None  # a pipe
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def _read_line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None  # a pipe
        if not select.select([process.stdout], [], [], WALL_LIMIT_S)[0]:
            process.kill()
            process.wait()
            raise TimeoutError(
                f"comparing answers did nothing for {WALL_LIMIT_S:g} s: is this machine too busy?"
            )
        line = process.stdout.readline()
        if not line:
            process.wait()
        return line


def _plain(answer: str) -> str:
    """Drop what surrounds an answer and means nothing: spaces, `$`, a final period."""
    return re.sub(r"\s+", " ", answer).strip().strip("$").strip().removesuffix(".")


def _is_word(answer: str) -> bool:
    return len(answer) > 1 and all(part.isalpha() for part in answer.split())
