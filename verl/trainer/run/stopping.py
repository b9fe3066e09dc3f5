# SPDX-License-Identifier: Apache-2.0
"""Stopping a run by Ctrl-C, or by the SIGTERM of a scheduler.

After the first signal the run finishes and saves its current step. A second one ends it at once.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENDED_BY = 128  # + the number of the signal: exit status of a process that a signal ended


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler of `SIGNALS` inside the block, in the main thread."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopRequest:
    """A request to stop the run."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first one that was received

    @property
    def exit_status(self) -> int:
        return 0 if self.signal is None else ENDED_BY + self.signal

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals inside the block instead of ending the process."""
        with handling_signals(self._on_signal):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal is not None:
            sys.stderr.write(f"\n{name} again: stopping at once\n")
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(ENDED_BY + number)
        self.signal = signal.Signals(number)
        sys.stderr.write(f"\n{name}: finishing and saving this step; send it again to stop at once\n")
