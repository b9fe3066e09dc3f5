# SPDX-License-Identifier: Apache-2.0
"""All loggers of a run as one."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from verl.logger import file, services  # noqa: F401 (importing them registers their loggers)
from verl.logger.base import LOGGERS, Generation, Metrics, Run, import_optional
from verl.logger.console import logger as console  # noqa: F401 (the same)
from verl.logger.guarded import CLOSE_S, HURRY_S, BackgroundLogger, GuardedLogger


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
        for logger in self._loggers:
            logger.call(method, *arguments)

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        is_interrupt = exception_type in (KeyboardInterrupt, SystemExit)
        self.close(failed=exception_type is not None, wait_s=HURRY_S if is_interrupt else None)
