# SPDX-License-Identifier: Apache-2.0
"""Reading rows of a data set in processes, ahead of their use."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch

from verl.data.bad_rows import BadRow
from verl.data.dataset import RowDataset, start_with
from verl.utils.background import in_background
from verl.utils.processes.child_process import ChildEndedError, name_process
from verl.utils.processes.fork_server import ForkServer, fork
from verl.utils.processes.isolated_calls import IsolatedCalls
from verl.utils.rank_logger import get_logger

Item = dict[str, Any] | BadRow
Tasks = SimpleQueue[tuple[int, Future[Item]] | None]

NAME = "row reader"

logger = get_logger(__name__)


class RowReaders:
    """Reads rows in processes, in a given order and some ahead of their use.

    They are forked by a process that holds the data set and has no threads, so that readers may start at any
    time, in milliseconds.

    Args:
        num_workers: Number of processes; 0 reads in this one, and nothing ahead.
        ahead: Rows that are read before they are used, at least.
    """

    def __init__(self, dataset: RowDataset, num_workers: int, ahead: int) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self.ahead = max(2 * num_workers, ahead)
        self._read = partial(_read_row, dataset)
        self._server = ForkServer(dataset, fork)

    def rows(self, order: Iterable[int]) -> Iterator[Item]:
        """Yield the rows at the given positions; the processes end with the iterator."""
        return self._rows(iter(order)) if self.num_workers else map(self._read, order)

    def _rows(self, order: Iterator[int]) -> Iterator[Item]:
        tasks: Tasks = SimpleQueue()
        processes = [self._start() for _ in range(self.num_workers)]
        for process in processes:
            in_background(partial(_serve, process, tasks), name=NAME)
        waiting = deque(_ask(tasks, index) for index in islice(order, self.ahead))
        try:
            while waiting:
                item = waiting.popleft().result()
                waiting.extend(_ask(tasks, index) for index in islice(order, 1))
                yield item
        finally:
            while not tasks.empty():
                tasks.get()
            for process in processes:
                tasks.put(None)
                process.close()

    def _start(self) -> IsolatedCalls[int, Item]:
        process = IsolatedCalls(self._read, None, _enter, start=self._server.fork)
        start_with(self.dataset, process, "data.num_workers", self.num_workers, 0)
        return process


def _ask(tasks: Tasks, index: int) -> "Future[Item]":
    answer: Future[Item] = Future()
    tasks.put((index, answer))
    return answer


def _serve(process: IsolatedCalls[int, Item], tasks: Tasks) -> None:
    """Have a process read rows until there is a None; a row that ends it is read once more."""
    while (task := tasks.get()) is not None:
        index, answer = task
        try:
            answer.set_result(_read_twice(process, index))
        except BaseException as error:  # noqa: BLE001 - raised by who waits for the row
            answer.set_exception(error)


def _read_twice(process: IsolatedCalls[int, Item], index: int) -> Item:
    try:
        return process(index)
    except ChildEndedError as error:
        logger.warning("replacing a dead process that read rows: row=%d cause=%s", index, error)
    try:
        return process(index)
    except ChildEndedError as error:
        raise RuntimeError(
            f"the process that read row {index} {error}, and so did the one that replaced it: lower"
            " `data.num_workers` if memory is short"
        ) from error


# The rest runs in the processes.


def _enter() -> None:
    name_process(NAME)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def _read_row(dataset: RowDataset, index: int) -> Item:
    """Return an item whose tensors are arrays: pickled, each tensor would hold a file descriptor."""
    item = dataset[index]
    if isinstance(item, BadRow):
        return item
    return item | {name: item[name].numpy() for name in dataset.tensors}
