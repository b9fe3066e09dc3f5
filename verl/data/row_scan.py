# SPDX-License-Identifier: Apache-2.0
"""Inspect every row of a data set, in several processes where that pays."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from queue import SimpleQueue
from typing import Any

from verl.utils.child_process import IsolatedCalls

PARTS_PER_PROCESS = 8  # rows with large videos are not spread evenly


def scan_rows(
    inspect: Callable[[range], list[Any]], num_rows: int, workers: int, rows_for_one: int
) -> list[Any]:
    """Call `inspect` on consecutive ranges of rows and join its lists of results in order.

    Args:
        inspect: Returns one result for each row number in a range.
        num_rows: Total number of rows.
        workers: Maximum number of processes, bounded by the number of cores.
        rows_for_one: With fewer rows, everything runs in this process.

    Raises:
        RuntimeError: A process was killed or crashed.
        Exception: Whatever `inspect` raises.
    """
    workers = min(workers, os.cpu_count() or 1)
    if workers < 2 or num_rows < rows_for_one:
        return inspect(range(num_rows))
    size = -(-num_rows // (workers * PARTS_PER_PROCESS))
    parts = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    idle: SimpleQueue[IsolatedCalls[range, tuple[list[Any], Exception | None]]] = SimpleQueue()

    def inspect_elsewhere(part: range) -> list[Any]:
        process = idle.get()
        try:
            results, error = process(part)
        finally:
            idle.put(process)
        if error is not None:
            raise error
        return results

    results: list[Any] = []
    with ThreadPoolExecutor(workers) as threads, ExitStack() as processes:
        for _ in range(workers):
            # Forked, they share the opened files and the tokenizer. They start here, before any thread does.
            process = processes.enter_context(closing(IsolatedCalls(partial(_catch, inspect), None, _enter)))
            process.start()
            idle.put(process)
        try:
            for part in threads.map(inspect_elsewhere, parts):
                results += part
        except ChildProcessError as error:
            raise RuntimeError(
                f"a process that checks the rows died, as one does when memory runs out; the first row that"
                f" was not checked is {len(results)} of all files: fewer"
                " `data.filter_overlong_prompts_workers` need less memory"
            ) from error
    return results


def _enter() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _catch(function: Callable[[range], list[Any]], part: range) -> tuple[list[Any], Exception | None]:
    """Return what a function returns and what it raises, so that the error keeps its type."""
    try:
        return function(part), None
    except Exception as error:  # noqa: BLE001 (raised again by the caller)
        return [], error
