# SPDX-License-Identifier: Apache-2.0
"""Shows what a run does before its first step, with seconds. Imports no torch.

    starting math/first with 8 processes: checkpoints/math/first
      libraries               4.2 s
      Ray                     3.9 s
      ...
    ready after 41.3 s

Any module may name a part of the start, also one that runs in its own thread; elsewhere than at the
start of a command that shows it, this does nothing::

    with phase("data"):
        ...
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from verl.config.trainer import RunConfig
from verl.logger.console.bar import stderr_console, stdout_console

NAME_WIDTH = 22
QUIET_S = 30.0  # without a terminal: longest silence
REFRESHES = 4  # of the live line per second


class StartUp:
    """Prints a line per phase; on a terminal a live line shows the phases that are running."""

    def __init__(
        self,
        console: Console,
        title: str,
        now: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._console, self._now, self._quiet_s = console, now, quiet_s
        self._started = now()
        self._running: dict[str, float] = {}  # since when
        self._live: Live | None = None
        self._is_over = threading.Event()
        self._last_line = 0.0
        self._print(title)
        if console.is_terminal:
            self._live = Live(self, console=console, refresh_per_second=REFRESHES, transient=True)
            self._live.start()
        else:
            threading.Thread(target=self._report_silence, name="start-up", daemon=True).start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Print the name of a part of the start and its seconds, unless it fails."""
        start = self._running[name] = self._now()
        try:
            yield
        finally:
            self._running.pop(name, None)
        self._print(f"  {name:<{NAME_WIDTH}} {self._now() - start:6.1f} s")

    def release_live_line(self) -> None:
        """Give the last line of the terminal to the steps."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def finish(self) -> None:
        if not self._is_over.is_set():
            self.close()
            self._print(f"ready after {self._now() - self._started:.1f} s")

    def close(self) -> None:
        """End without a word, after a failure."""
        self._is_over.set()
        self.release_live_line()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._running_text(), no_wrap=True, overflow="crop", style="cyan")

    def _running_text(self) -> str:
        phases = [f"{name} {self._now() - start:.0f} s" for name, start in [*self._running.items()]]
        return f"  {', '.join(phases)} ..." if phases else ""

    def _report_silence(self) -> None:
        while not self._is_over.wait(max(0.0, self._last_line + self._quiet_s - time.monotonic())):
            if time.monotonic() >= self._last_line + self._quiet_s:
                self._print(self._running_text() or "  ...")

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(Text(line), soft_wrap=True)


_shown: list[StartUp] = []  # at most one: of the run that this process starts


@contextmanager
def shown_start_up(trainer: RunConfig) -> Iterator[None]:
    """Show the phases inside the block, until the first step, if the run logs to the console."""
    if "console" not in trainer.logger or _shown:
        yield
        return
    console = stderr_console() if trainer.console == "json" else stdout_console()
    processes = "1 process" if trainer.world_size == 1 else f"{trainer.world_size} processes"
    title = f"starting {trainer.project_name}/{trainer.experiment_name} with {processes}"
    start_up = StartUp(console, f"{title}: {trainer.checkpoint_folder}")
    _shown.append(start_up)
    try:
        yield
    finally:
        start_up.close()
        _shown.clear()


def phase(name: str) -> AbstractContextManager[None]:
    """Measure a part of the start of a run, see the module."""
    return _shown[-1].phase(name) if _shown else nullcontext()


def release_live_line() -> None:
    for start_up in _shown:
        start_up.release_live_line()


def finish_start_up() -> None:
    """Say that the first step begins."""
    for start_up in _shown:
        start_up.finish()
