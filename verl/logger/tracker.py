# SPDX-License-Identifier: Apache-2.0
"""All loggers of a run as one: a failure of one costs its own lines, never a step or the exit status."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import Any, ClassVar

from verl.logger import file, services  # noqa: F401 (importing them registers their loggers)
from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, import_optional
from verl.logger.console import logger as console  # noqa: F401 (the same)
from verl.utils.rank_logger import get_logger

MAX_WAITING = 1000  # calls that a slow service may be behind
OPEN_S = 60.0  # that the start of a run waits for a service, which may ask its user to log in
CLOSE_S = 60.0  # that the end of a run waits for the lines that are left
HURRY_S = 3.0  # the same after an interrupt

logger = get_logger(__name__)


def check_loggers(loggers: Sequence[str]) -> None:
    """Raise unless the names are known and their packages installed; call before anything starts."""
    for name in loggers:
        if LOGGERS[name].module:
            import_optional(LOGGERS[name].module, name)


class Tracker(AbstractContextManager["Tracker"]):
    """Passes metrics, validation responses and progress to every logger in `trainer.logger`.

    Example::

        with Tracker(["console", "file"], Run("project", "experiment", Path("checkpoints/demo"))) as tracker:
            tracker.begin_step(1)
            tracker.log({"reward/overall": 0.5}, step=1)
    """

    def __init__(self, loggers: Sequence[str], run: Run) -> None:
        check_loggers(loggers)  # before the first opens
        self._loggers: list[GuardedLogger] = []
        for name in dict.fromkeys(loggers):
            guard = GuardedLogger if LOGGERS[name].is_local else BackgroundLogger
            self._loggers.append(guard(name, LOGGERS[name], run))
            self._loggers[-1].open()

    def begin_step(self, step: int) -> None:
        self._call("begin_step", step)

    def stage(self, name: str) -> None:
        self._call("stage", name)

    def progress(self, done: int, total: int, unit: str) -> None:
        self._call("progress", done, total, unit)

    def log(self, metrics: Metrics, step: int) -> None:
        self._call("log", dict(metrics), step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        self._call("log_generations", list(generations), step)

    def close(self, failed: bool = False, wait_s: float | None = None) -> None:
        """Close every logger, waiting at most `wait_s` seconds for services."""
        deadline = time.monotonic() + (CLOSE_S if wait_s is None else wait_s)
        self._call("close", failed)
        while self._loggers:
            self._loggers.pop().finish(deadline)

    def _call(self, method: str, *arguments: Any) -> None:
        for guard in self._loggers:
            guard.call(method, *arguments)

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        is_interrupt = exception_type in (KeyboardInterrupt, SystemExit)
        self.close(failed=exception_type is not None, wait_s=HURRY_S if is_interrupt else None)


class GuardedLogger:
    """Calls a logger in this thread. The first call that fails is a warning; later ones are tried again."""

    FAILURES: ClassVar[tuple[type[BaseException], ...]] = (Exception,)  # whatever a service's package raises

    def __init__(self, name: str, kind: type[Logger], run: Run) -> None:
        self.name, self._kind, self._run = name, kind, run
        self._logger: Logger | None = None
        self._has_warned = False

    def open(self) -> None:
        try:
            self._logger = self._kind(self._run)
        except self.FAILURES as error:
            self._warn(f"{type(error).__name__}: {error}")

    def call(self, method: str, *arguments: Any) -> None:
        if getattr(self._kind, method) is getattr(Logger, method):
            return  # it does nothing
        if self._logger is None and method == "log":
            self.open()  # what was in the way before, such as a full disk, may be gone
        if self._logger is None:
            return
        try:
            getattr(self._logger, method)(*arguments)
        except self.FAILURES as error:
            self._warn(f"{type(error).__name__}: {error}")

    def finish(self, deadline: float) -> None:
        """Wait until everything is logged or the monotonic clock shows `deadline`."""

    def _warn(self, cause: str) -> None:
        if not self._has_warned:
            logger.warning("a logger loses lines, the run continues: logger=%s cause=%s", self.name, cause)
        self._has_warned = True


class BackgroundLogger(GuardedLogger):
    """Calls a logger in its own thread, in order, so that a service that hangs holds up nothing."""

    FAILURES: ClassVar = (Exception, SystemExit)  # not those of a signal, which reach only the main thread

    def __init__(self, name: str, kind: type[Logger], run: Run) -> None:
        super().__init__(name, kind, run)
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self._is_tried = threading.Event()
        self._thread = _LoggerThread(target=self._serve, name=f"logger {name}", daemon=True)

    def open(self) -> None:
        self._thread.start()
        if not self._is_tried.wait(OPEN_S):
            self._warn(f"it did not open within {OPEN_S:.0f} s")

    def call(self, method: str, *arguments: Any) -> None:
        if method != "close" and self._calls.qsize() >= MAX_WAITING:
            self._warn(f"it does not answer, and {MAX_WAITING} calls wait for it")
        elif self._thread.is_alive():
            self._calls.put((method, arguments))

    def finish(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn("it did not end in time")

    def _serve(self) -> None:
        super().open()
        self._is_tried.set()
        method = "" if self._logger is not None else "close"
        while method != "close":
            method, arguments = self._calls.get()
            super().call(method, *arguments)


class _LoggerThread(threading.Thread):
    """A thread that a package may block forever."""


def end_process_if_hung(status: int) -> None:
    """End this process if a logger hangs in it: the exit hooks of its package would wait for the service."""
    if any(isinstance(thread, _LoggerThread) for thread in threading.enumerate()):
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
