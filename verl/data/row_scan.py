# SPDX-License-Identifier: Apache-2.0
"""Looking at every row of a data set, on several processes where that pays."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

PARTS_FOR_EACH_PROCESS = 8  # rows with large videos are not spread evenly

_inspect: Callable[[range], list[Any]] | None = None  # what a worker of the pool calls; set when it is forked


def scan_rows(
    inspect: Callable[[range], list[Any]], num_rows: int, workers: int, rows_for_one: int
) -> list[Any]:
    """Call `inspect` on consecutive parts of the rows.

    Args:
        inspect: Takes a range of row numbers and returns one result for each row.
        num_rows: Rows in all.
        workers: Processes at most; no more than there are cores.
        rows_for_one: With fewer rows everything happens in this process.

    Returns:
        The results in the order of the rows.

    Raises:
        RuntimeError: A process was killed, or crashed. Media are opened beside it, so that theirs is not the
            fault.
        Exception: Whatever `inspect` raises.
    """
    workers = min(workers, os.cpu_count() or 1)
    if workers < 2 or num_rows < rows_for_one:
        return inspect(range(num_rows))
    size = -(-num_rows // (workers * PARTS_FOR_EACH_PROCESS))
    parts = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    # fork: the children have the opened files and the tokenizer of this process and need not load them again
    context = multiprocessing.get_context("fork")
    # An executor ends its processes by a message. A `multiprocessing.Pool` that is left by an exception sends
    # SIGTERM, which under Ray a child that has not come to `_enter` yet ignores, and waits for it forever.
    results: list[Any] = []
    with ProcessPoolExecutor(workers, context, initializer=_enter, initargs=(inspect,)) as pool:
        try:
            for part in pool.map(_inspect_part, parts):
                results += part
        except TimeoutError as error:  # raised anew, as an error of this process
            raise TimeoutError(str(error)) from error
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"a process that checks the rows has died, as one does when memory runs out; the first row"
                f" that was not checked is {len(results)} of all files: fewer"
                " `data.filter_overlong_prompts_workers` need less memory"
            ) from error
    return results


def _enter(inspect: Callable[[range], list[Any]]) -> None:
    global _inspect
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler, inherited by a fork, does not end it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _inspect = inspect


def _inspect_part(part: range) -> list[Any]:
    assert _inspect is not None, "the worker was entered"
    return _inspect(part)
