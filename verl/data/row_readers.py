# SPDX-License-Identifier: Apache-2.0
"""Readers of rows in processes: of their media, since a decoder may crash or hang, and of whole rows, ahead.

Those of a data set are forked by a process that holds it and has no threads, so that readers may start at any
time, in milliseconds.
"""

import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from verl.data.bad_rows import BadRow
from verl.data.media.loader import MediaLoader
from verl.data.media.references import MediaData, shown_name
from verl.models.families.interface import MediaShape
from verl.utils.processes.child_process import ChildEndedError, name_process
from verl.utils.processes.fork_server import ForkServer, fork
from verl.utils.processes.isolated_calls import IsolatedCalls
from verl.utils.rank_logger import get_logger

A = TypeVar("A")
R = TypeVar("R")
Item = dict[str, Any] | BadRow

NAME = "row reader"
ROW_TIMEOUT_S = 300.0
PARTS_PER_PROCESS = 8  # rows with large videos are not spread evenly

logger = get_logger(__name__)


class MediaReader:
    """Reads the media of rows in a child process, one row at a time.

    Decoded media go to the loader's cache; only sizes come back. A row that ends the process is tried once
    more. Media named by URL are fetched in this process before, within limits of their own.

    Args:
        timeout_s: Limit for a row in seconds, not counting downloads; None means no limit.
        columns: Column names of `images` and `videos`, for errors.
    """

    def __init__(self, loader: MediaLoader, timeout_s: float | None, columns: Mapping[str, str]) -> None:
        self.loader, self._columns = loader, columns
        read, enter = partial(_read_media, loader), partial(_enter_with, loader)
        self._calls = IsolatedCalls(read, timeout_s, enter, retry=True)

    def read(self, media: MediaData, *, decode: bool) -> MediaShape:
        """Return the shapes of a row's media, decoded into the loader's cache or only measured.

        A file that cannot be fetched or read, or that ends or holds up the process, is a ValueError.
        """
        names: list[str] = []
        for kind in self._columns:
            refs = (media or {}).get(kind) or ()
            names += [f"the {kind.removesuffix('s')} {shown_name(ref)}" for ref in refs]
            try:
                for ref in refs:
                    self.loader.on_disk(ref)
            except ValueError as error:
                raise ValueError(f"column `{self._columns[kind]}`: {error}") from error
        try:
            return self._calls((media, decode))
        except (ChildProcessError, TimeoutError) as error:
            raise ValueError(f"the process that read {', '.join(names)} {error}") from error

    def close(self) -> None:
        self._calls.close()


class RowReaders:
    """Reads rows of a data set in processes, in a given order and some ahead of their use.

    Args:
        num_workers: Number of processes, at most one a core; 0 reads in this one, and nothing ahead.
        ahead: Rows that are read before they are used, at least.
    """

    def __init__(self, dataset: Any, num_workers: int, ahead: int) -> None:
        self.dataset = dataset
        self.num_workers = min(num_workers, len(dataset), len(os.sched_getaffinity(0)))
        self.ahead = max(2 * self.num_workers, ahead)
        self._read = partial(_read_row, dataset)
        self._server = ForkServer(dataset, fork)

    def rows(self, order: Iterable[int]) -> Iterator[Item]:
        """Yield the rows at the given positions; the processes end with the iterator."""
        if not self.num_workers:
            yield from map(self._read, order)
            return
        processes = _started(self.dataset, self._read, self._server, "data.num_workers", self.num_workers, 0)
        with ExitStack() as stack:
            readers = [partial(_read_twice, stack.enter_context(closing(each))) for each in processes]
            yield from _in_order(readers, order, self.ahead)


def scan_rows(inspect: Callable[[int], Any], rows: int, workers: int, rows_for_one: int) -> list[Any]:
    """Call `inspect` with the number of each row; return its results in order.

    Fewer than `rows_for_one` rows, or a single worker (at most one for each core), stay in this process.
    """
    workers = min(workers, os.cpu_count() or 1)
    if workers < 2 or rows < rows_for_one:
        return [inspect(row) for row in range(rows)]
    size = -(-rows // (workers * PARTS_PER_PROCESS))
    parts = [range(start, min(start + size, rows)) for start in range(0, rows, size)]
    dataset, option = getattr(inspect, "__self__", None), "data.filter_overlong_prompts_workers"
    results: list[Any] = []
    with ExitStack() as stack:
        server = stack.enter_context(closing(ForkServer(dataset, fork)))
        processes = _started(dataset, partial(_catch, inspect), server, option, workers, 1)
        calls = [stack.enter_context(closing(each)) for each in processes]
        try:
            for part, error in _in_order(calls, parts, ahead=len(parts)):
                if error is not None:
                    raise error
                results += part
        except ChildProcessError as error:
            raise RuntimeError(
                f"a process that checks the rows died, as one does when memory runs out; the first row that"
                f" was not checked is {len(results)} of all files: fewer `{option}` need less memory"
            ) from error
    return results


def _started(
    dataset: Any, read: Callable[[A], R], server: ForkServer, option: str, number: int, alone: int
) -> Iterator[IsolatedCalls[A, R]]:
    """Start the `number` processes of an option; with `alone` of them the data set stays here."""
    for _ in range(number):
        process = IsolatedCalls(read, None, _enter, start=server.fork)
        try:
            process.start()
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"`{option}` ({number}) needs a data set that can be pickled, and {type(dataset).__name__}"
                f" cannot: {error}; set `{option}={alone}`, or give it a `__getstate__` without what cannot"
                " be pickled"
            ) from error
        yield process


def _in_order(workers: Sequence[Callable[[A], R]], arguments: Iterable[A], ahead: int) -> Iterator[R]:
    """Yield the results of calls in order; each worker has a thread, and some calls are made `ahead`."""
    order = iter(arguments)
    tasks: SimpleQueue[tuple[A, Future[R]] | None] = SimpleQueue()

    def ask(argument: A) -> "Future[R]":
        answer: Future[R] = Future()
        tasks.put((argument, answer))
        return answer

    for worker in workers:
        threading.Thread(target=_serve, args=(worker, tasks), name=NAME, daemon=True).start()
    waiting = deque(map(ask, islice(order, ahead)))
    try:
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(map(ask, islice(order, 1)))
            yield result
    finally:
        while not tasks.empty():
            tasks.get()
        for _ in workers:
            tasks.put(None)


def _serve(worker: Callable[[A], R], tasks: SimpleQueue[tuple[A, "Future[R]"] | None]) -> None:
    while (task := tasks.get()) is not None:
        argument, answer = task
        try:
            answer.set_result(worker(argument))
        except BaseException as error:  # noqa: BLE001 - raised by who waits for the result
            answer.set_exception(error)


def _read_twice(process: IsolatedCalls[int, Item], index: int) -> Item:
    """Read a row, once more if it ends the process."""
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
    _use_one_thread()


def _use_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # a forked process has lost the threads of its parent


def _enter_with(loader: MediaLoader) -> None:
    _use_one_thread()
    if loader.cache.directory is not None:
        loader.cache.local_bytes = 0  # nothing is asked for twice, and others find it in the directory


def _read_media(loader: MediaLoader, request: tuple[MediaData, bool]) -> MediaShape:
    media, decode = request
    return loader.shape_of(loader.decode(media)) if decode else loader.measure(media)


def _read_row(dataset: Any, index: int) -> Item:
    """Return an item whose tensors are arrays: pickled, each tensor would hold a file descriptor."""
    item = dataset[index]
    if isinstance(item, BadRow):
        return item
    return item | {name: item[name].numpy() for name in dataset.tensors}


def _catch(inspect: Callable[[int], Any], part: range) -> tuple[list[Any], Exception | None]:
    try:
        return [inspect(row) for row in part], None
    except Exception as error:  # noqa: BLE001 (raised again by the caller, of the same type)
        return [], error
