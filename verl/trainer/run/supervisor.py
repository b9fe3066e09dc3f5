# SPDX-License-Identifier: Apache-2.0
"""A run that survives the loss of workers, machines and its controller: it goes on from a checkpoint.

With `trainer.max_restarts` the training runs in a child process. A worker that was killed, ran out of memory,
is stopped or makes no progress ends an attempt; so does the loss of a machine, of Ray's head, or of the child
itself. The next attempt puts everything together anew. An exception that a worker raised is not the machine's
fault and would come again: it ends the run.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

from verl.checkpoint.tracker import TRACKER, find_last_checkpoint
from verl.config.trainer import RunTree
from verl.trainer.run.exit_status import FAILED, ExitStatus, how_to_go_on, report_failure
from verl.trainer.run.run_lock import held_by_child
from verl.trainer.run.stopping import ENDED_BY, SIGNALS
from verl.utils.child_process import end_with_parent
from verl.utils.rank_logger import get_logger

GLANCE_S = 0.5  # between looks whether the child lives

C = TypeVar("C", bound=RunTree)
# Trains once: gets the config, and how long to wait, in seconds, for machines that are gone; None is in the
# first attempt. A function of a module, for the child imports it; its body imports torch, not its module.
Attempt = Callable[[C, float | None], ExitStatus]

logger = get_logger(__name__)


class Supervisor(Generic[C]):
    """Trains to the end, through as many failures as `trainer.max_restarts` allows.

    Example::

        ending = Supervisor(config, train_once).run()
        sys.exit(ending.status)

    Attributes:
        restarts: How often the run was started again.
        signal: The last signal that asked it to end.
    """

    def __init__(self, config: C, attempt: Attempt[C]) -> None:
        self.config = config
        self.attempt = attempt
        self.restarts = 0
        self.signal: signal.Signals | None = None
        self._tracker = Path(config.trainer.checkpoint_folder) / TRACKER
        self._saved_before = _time_of(self._tracker)

    def run(self) -> ExitStatus:
        """Train; returns how the last attempt ended."""
        while True:
            ending = self._attempt()
            is_allowed = self.restarts < self.config.trainer.max_restarts and self.signal is None
            if not (ending.may_go_away and is_allowed):
                return ending
            self._prepare_restart(ending)

    def _attempt(self) -> ExitStatus:
        """Train in a process of its own."""
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        patience_s = self.config.trainer.restart_wait_s if self.restarts else None
        arguments = (self.attempt, self.config, patience_s, sender)
        child = context.Process(target=_train, args=arguments, name="controller")
        child.start()
        sender.close()
        assert child.pid is not None, "it was started"
        with self._forwarding(child.pid):
            while not receiver.poll(GLANCE_S) and child.exitcode is None:
                pass  # its own children may hold the pipe longer than it lives
            ending = _last_words(receiver)
            child.join()
        return ending or self._ending_of_dead(child.exitcode or 0)

    @contextmanager
    def _forwarding(self, pid: int) -> Iterator[None]:
        """Hand signals on to the child inside the block: Ctrl-C and SIGTERM mean the training."""

        def forward(number: int, frame: object) -> None:
            self.signal = signal.Signals(number)
            os.kill(pid, number)

        before = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ending_of_dead(self, exit_code: int) -> ExitStatus:
        """What to make of a child that ended without a word."""
        trainer = self.config.trainer
        if self.signal is not None:
            return ExitStatus(ENDED_BY + self.signal, f"ended by {self.signal.name}; {how_to_go_on(trainer)}")
        end = (
            f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with {exit_code}"
        )
        cause = f"the controller process {end}; for want of memory, or by Ray whose head is gone"
        report_failure(trainer, None, cause)
        return ExitStatus(FAILED, f"{cause}\n\n{how_to_go_on(trainer)}", may_go_away=True)

    def _prepare_restart(self, ending: ExitStatus) -> None:
        """Let the next attempt begin at the last checkpoint that this run wrote, or where it began."""
        self.restarts += 1
        trainer = self.config.trainer
        saved = find_last_checkpoint(trainer.checkpoint_folder) if self._has_saved() else None
        if saved is not None and (trainer.load_checkpoint_path or not trainer.find_last_checkpoint):
            self.config = replace(self.config, trainer=replace(trainer, load_checkpoint_path=str(saved)))
        logger.warning(
            "starting again: restart=%d of=%d lost_step=%s from=%s cause=%s",
            self.restarts,
            trainer.max_restarts,
            ending.step,
            saved or "where the run began",
            (ending.message or "").splitlines()[0],
        )

    def _has_saved(self) -> bool:
        return _time_of(self._tracker) != self._saved_before


def _train(attempt: Attempt[C], config: C, patience_s: float | None, sender: Connection) -> None:
    """The child: train and say how it ended."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent alone, which hands it on: once, not twice
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "this is a child"
    end_with_parent(parent.pid, signal.SIGTERM)  # nobody would start this again
    ending = ExitStatus(FAILED)
    try:
        with held_by_child(config.trainer):
            ending = attempt(config, patience_s)
    except SystemExit as end:
        ending = ExitStatus(end.code if isinstance(end.code, int) else FAILED)
        raise
    finally:
        sender.send(ending)
    sys.exit(ending.status)


def _last_words(receiver: Connection) -> ExitStatus | None:
    """How the child said that it ended; None if it did not say."""
    try:
        return receiver.recv() if receiver.poll() else None
    except EOFError:
        return None


def _time_of(path: Path) -> int | None:
    """When a file was written, in nanoseconds; None if there is none."""
    return path.stat().st_mtime_ns if path.is_file() else None
