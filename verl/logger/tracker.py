# SPDX-License-Identifier: Apache-2.0
"""All loggers of a run as one."""

from collections.abc import Sequence

from verl.logger import console, file, services  # noqa: F401 (importing them registers their loggers)
from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, import_optional


def check_loggers(loggers: str | Sequence[str]) -> None:
    """Check, before anything is started, that the packages of these loggers are installed.

    Raises:
        ValueError: A name is unknown.
        ModuleNotFoundError: Names the package and the command that installs it.
    """
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if LOGGERS[name].module:
            import_optional(LOGGERS[name].module, name)


class Tracker:
    """Hands metrics, validation responses and progress to every logger named in `trainer.logger`.

    Example::

        with Tracker(["console", "file"], Run("project", "experiment", Path("checkpoints/demo"))) as tracker:
            tracker.begin_step(1)
            tracker.stage("gen")
            tracker.progress(96, 256, "responses")
            tracker.log({"reward/overall": 0.5}, step=1)
    """

    def __init__(self, loggers: str | Sequence[str], run: Run) -> None:
        """Open the loggers.

        Raises:
            ValueError: A name is unknown.
            ModuleNotFoundError: A logger's package is not installed.
            OSError: The run's folder cannot be written.
        """
        names = [loggers] if isinstance(loggers, str) else list(loggers)
        classes = [
            LOGGERS[name] for name in dict.fromkeys(names)
        ]  # all names are right before the first one opens
        self._loggers: list[Logger] = []
        try:
            for logger_class in classes:
                self._loggers.append(logger_class(run))
        except BaseException:
            self.close(failed=True)
            raise

    def begin_step(self, step: int) -> None:
        """A step begins."""
        for logger in self._loggers:
            logger.begin_step(step)

    def stage(self, name: str) -> None:
        """The step is doing this from now on, for example "gen" or "update_actor"."""
        for logger in self._loggers:
            logger.stage(name)

    def progress(self, done: int, total: int, unit: str) -> None:
        """The stage has done so many of its units."""
        for logger in self._loggers:
            logger.progress(done, total, unit)

    def log(self, metrics: Metrics, step: int) -> None:
        """Log the metrics of a step, plain floats named `area/name`."""
        for logger in self._loggers:
            logger.log(metrics, step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Log responses of a validation."""
        for logger in self._loggers:
            logger.log_generations(generations, step)

    def close(self, failed: bool = False) -> None:
        """Close every logger; `failed` if an exception ended the run."""
        while self._loggers:
            self._loggers.pop().close(failed)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        self.close(failed=exception_type is not None)
