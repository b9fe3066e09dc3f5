# SPDX-License-Identifier: Apache-2.0
"""Restarts a run from its last checkpoint after it lost workers, machines or its controller.

With `trainer.max_restarts` the training runs in a child process. A worker that was killed, ran out of memory,
is stopped or makes no progress ends the child's run; so does the loss of a machine, of Ray's head, or of the
child itself. An exception that a worker raised would be raised again: it ends the run.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from verl.checkpoint.tracker import TRACKER, find_last_checkpoint
from verl.config.trainer import RunTree
from verl.logger.tracker import end_process_if_hung
from verl.trainer.run.exit_status import FAILED, ExitStatus, report_failure, resume_hint
from verl.trainer.run.run_lock import locked_by_child
from verl.trainer.run.stopping import ENDED_BY, handling_signals
from verl.utils.processes.child_process import end_with_parent
from verl.utils.rank_logger import get_logger
from verl.utils.standard_streams import outlive_readers

POLL_S = 0.5  # between checks that the child lives

# Trains once. Arguments: the config, and the seconds to wait for missing machines (None in the first run).
# It must be a function of a module, because the child imports it, and import torch only in its body.
TrainOnce = Callable[[RunTree, float | None], ExitStatus]

logger = get_logger(__name__)


class Supervisor:
    """Trains to the end, with up to `trainer.max_restarts` restarts.

    Example::

        sys.exit(Supervisor(config, train_once).run().status)
    """

    def __init__(self, config: RunTree, train_once: TrainOnce) -> None:
        self.config = config
        self.train_once = train_once
        self.restarts = 0
        self.signal: signal.Signals | None = None  # the last one that asked the run to end
        self._tracker = Path(config.trainer.checkpoint_folder) / TRACKER
        self._saved_before = _modified_at(self._tracker)

    def run(self) -> ExitStatus:
        """Train; return the exit status of the last child."""
        while True:
            exit_status = self._run_child()
            is_allowed = self.restarts < self.config.trainer.max_restarts and self.signal is None
            if not (exit_status.retryable and is_allowed):
                return exit_status
            self._prepare_restart(exit_status)

    def _run_child(self) -> ExitStatus:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        wait_s = self.config.trainer.restart_wait_s if self.restarts else None
        arguments = (self.train_once, self.config, wait_s, sender)
        child = context.Process(target=_train, args=arguments, name="controller")
        child.start()
        sender.close()
        pid = child.pid
        assert pid is not None, "it was started"

        def forward(number: int, frame: object) -> None:
            self.signal = signal.Signals(number)
            os.kill(pid, number)

        with handling_signals(forward):
            while not receiver.poll(POLL_S) and child.exitcode is None:
                pass  # its own children may hold the pipe longer than it lives
            exit_status: ExitStatus | None = None
            with suppress(EOFError):
                exit_status = receiver.recv() if receiver.poll() else None
            child.join()
        return exit_status or self._status_of_dead(child.exitcode or 0)

    def _status_of_dead(self, exit_code: int) -> ExitStatus:
        """Return the status of a child that ended without sending one."""
        trainer = self.config.trainer
        if self.signal is not None:
            return ExitStatus(ENDED_BY + self.signal, f"ended by {self.signal.name}; {resume_hint(trainer)}")
        end = (
            f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with {exit_code}"
        )
        cause = f"the controller process {end}: out of memory, or by Ray after the loss of its head"
        report_failure(trainer, None, cause)
        return ExitStatus(FAILED, f"{cause}\n\n{resume_hint(trainer)}", retryable=True)

    def _prepare_restart(self, exit_status: ExitStatus) -> None:
        """Have the next child start from the last checkpoint of this run, or from where the run began."""
        self.restarts += 1
        trainer = self.config.trainer
        has_saved = _modified_at(self._tracker) != self._saved_before
        saved = find_last_checkpoint(trainer.checkpoint_folder) if has_saved else None
        if saved is not None and (trainer.load_checkpoint_path or not trainer.find_last_checkpoint):
            self.config = replace(self.config, trainer=replace(trainer, load_checkpoint_path=str(saved)))
        logger.warning(
            "restarting: restart=%d of=%d lost_step=%s from=%s cause=%s",
            self.restarts, trainer.max_restarts, exit_status.step, saved or "where the run began",
            (exit_status.message or "").splitlines()[0],
        )  # fmt: skip


def _train(train_once: TrainOnce, config: RunTree, wait_s: float | None, sender: Connection) -> None:
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches only the parent, which forwards it: once, not twice
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "this is a child"
    outlive_readers()
    end_with_parent(parent.pid)  # at once, until there is a step to save: see `StopRequest.listening`
    exit_status = ExitStatus(FAILED)
    try:
        with locked_by_child(config.trainer):
            exit_status = train_once(config, wait_s)
    except SystemExit as end:
        exit_status = ExitStatus(end.code if isinstance(end.code, int) else FAILED)
    finally:
        with suppress(BrokenPipeError):  # the parent was killed
            sender.send(exit_status)
    end_process_if_hung(exit_status.status)
    sys.exit(exit_status.status)


def _modified_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None
