# SPDX-License-Identifier: Apache-2.0
"""Attempts for the supervisor without any training; a separate process imports them, so no torch."""

import os
from pathlib import Path

from verl.config.trainer import RunTree
from verl.trainer.run.exit_status import ExitStatus

WAIT_S = 7.0
LOST = ExitStatus(1, "a worker was lost", 3, may_go_away=True)
WRONG = ExitStatus(1, "an exception that would be raised again", 3)
DONE = ExitStatus(0, step=5)


def lose_a_worker_once(config: RunTree, patience_s: float | None) -> ExitStatus:
    return LOST if _note(config, patience_s) == 1 else DONE


def lose_every_worker(config: RunTree, patience_s: float | None) -> ExitStatus:
    _note(config, patience_s)
    return LOST


def be_killed_once(config: RunTree, patience_s: float | None) -> ExitStatus:
    if _note(config, patience_s) == 1:
        os._exit(9)
    return DONE


def be_wrong(config: RunTree, patience_s: float | None) -> ExitStatus:
    _note(config, patience_s)
    return WRONG


def patience_of(config: RunTree) -> list[str]:
    """Return the patience of each attempt."""
    return _file(config).read_text().split()


def _note(config: RunTree, patience_s: float | None) -> int:
    """Record an attempt; return the number of attempts so far."""
    with _file(config).open("a") as file:
        file.write(f"{patience_s}\n")
    return len(patience_of(config))


def _file(config: RunTree) -> Path:
    return Path(config.trainer.checkpoint_folder) / "attempts"
