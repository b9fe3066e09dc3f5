# SPDX-License-Identifier: Apache-2.0
"""Stopping a run by Ctrl-C, by the SIGTERM of a scheduler, or by the SIGHUP of a terminal that closes.

After the first signal the run finishes and saves its current step. A second one ends it at once. Under
`nohup` the run continues without its terminal.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from verl.utils.processes.child_process import signal_when_parent_dies

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDED_BY = 128  # + the number of the signal: exit status of a process that a signal ended


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler of `SIGNALS` inside the block; under `nohup` not of SIGHUP.

    Python allows it in the main thread only: a run in another thread leaves signals to the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if not (is_nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def hangups_for_us_only() -> Iterator[None]:
    """Block SIGHUP inside the block, and in the processes that it starts: the run needs them to save."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """A request to stop the run."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first one that was received
        self._process = os.getpid()

    @property
    def exit_status(self) -> int:
        return 0 if self.signal is None else ENDED_BY + self.signal

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals inside the block instead of ending the process.

        The death of a supervisor, without which there would be no restart, counts as SIGTERM.
        """
        is_supervised = multiprocessing.parent_process() is not None
        with handling_signals(self._on_signal):
            if is_supervised:
                signal_when_parent_dies(signal.SIGTERM)
            try:
                yield
            finally:
                if is_supervised:
                    signal_when_parent_dies(signal.SIGKILL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a process that reads rows, forked from ours
        name = signal.Signals(number).name
        if self.signal is not None and number == signal.SIGHUP:
            return  # a closing terminal sends several
        if self.signal is not None:
            sys.stderr.write(f"\n{name} again: stopping at once\n")
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(ENDED_BY + number)
        self.signal = signal.Signals(number)
        sys.stderr.write(f"\n{name}: finishing and saving this step; send it again to stop at once\n")
