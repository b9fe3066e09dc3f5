# SPDX-License-Identifier: Apache-2.0
"""All loggers of a run as one."""

from collections.abc import Sequence

from verl.logger import console, file, services  # noqa: F401 (importing them registers their loggers)
from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, import_optional


def check_loggers(loggers: str | Sequence[str]) -> None:
    """Raise unless the names are known and their packages installed; call before anything starts."""
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if LOGGERS[name].module:
            import_optional(LOGGERS[name].module, name)


class Tracker:
    """Passes metrics, validation responses and progress to every logger in `trainer.logger`.

    Example::

        with Tracker(["console", "file"], Run("project", "experiment", Path("checkpoints/demo"))) as tracker:
            tracker.begin_step(1)
            tracker.log({"reward/overall": 0.5}, step=1)
    """

    def __init__(self, loggers: str | Sequence[str], run: Run) -> None:
        names = [loggers] if isinstance(loggers, str) else list(loggers)
        classes = [LOGGERS[name] for name in dict.fromkeys(names)]  # checks all names before the first opens
        self._loggers: list[Logger] = []
        try:
            for logger_class in classes:
                self._loggers.append(logger_class(run))
        except BaseException:
            self.close(failed=True)
            raise

    def begin_step(self, step: int) -> None:
        for logger in self._loggers:
            logger.begin_step(step)

    def stage(self, name: str) -> None:
        for logger in self._loggers:
            logger.stage(name)

    def progress(self, done: int, total: int, unit: str) -> None:
        for logger in self._loggers:
            logger.progress(done, total, unit)

    def log(self, metrics: Metrics, step: int) -> None:
        for logger in self._loggers:
            logger.log(metrics, step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        for logger in self._loggers:
            logger.log_generations(generations, step)

    def close(self, failed: bool = False) -> None:
        while self._loggers:
            self._loggers.pop().close(failed)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        self.close(failed=exception_type is not None)
