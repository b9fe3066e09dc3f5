# SPDX-License-Identifier: Apache-2.0
"""Ending a run from outside: Ctrl-C, or the SIGTERM of a scheduler whose time is up.

The first signal lets the step under way finish; the run then saves and ends. A second one ends it at once.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENDED_BY = 128  # + the number of the signal: exit status of a process that a signal ended


class StopRequest:
    """Whether somebody asked the run to stop.

    Example::

        stop = StopRequest()
        with stop.listening():
            while not stop.signal:
                train_step()

    Attributes:
        signal: The first signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_status(self) -> int:
        """0, or 128 + the signal that asked the run to stop."""
        return 0 if self.signal is None else ENDED_BY + self.signal

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests inside the block, in the main thread."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal is not None:
            sys.stderr.write(f"\n{name} again: stopping at once\n")
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(ENDED_BY + number)
        self.signal = signal.Signals(number)
        sys.stderr.write(f"\n{name}: this step is finished and saved; once more to stop at once\n")
