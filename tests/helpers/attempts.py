# SPDX-License-Identifier: Apache-2.0
"""Functions for the supervisor that train nothing; a child process imports them, so without torch."""

import os
from pathlib import Path

from verl.config.trainer import RunTree
from verl.trainer.run.exit_status import ExitStatus

WAIT_S = 7.0
LOST = ExitStatus(1, "a worker was lost", 3, retryable=True)
WRONG = ExitStatus(1, "an exception that would come again", 3)
DONE = ExitStatus(0, step=5)


def lose_a_worker_once(config: RunTree, wait_s: float | None) -> ExitStatus:
    return LOST if _note(config, wait_s) == 1 else DONE


def lose_every_worker(config: RunTree, wait_s: float | None) -> ExitStatus:
    _note(config, wait_s)
    return LOST


def be_killed_once(config: RunTree, wait_s: float | None) -> ExitStatus:
    if _note(config, wait_s) == 1:
        os._exit(9)
    return DONE


def be_wrong(config: RunTree, wait_s: float | None) -> ExitStatus:
    _note(config, wait_s)
    return WRONG


def waits_of(config: RunTree) -> list[str]:
    """The wait for missing machines of each run."""
    return _file(config).read_text().split()


def _note(config: RunTree, wait_s: float | None) -> int:
    """Record a run; return how many there were."""
    with _file(config).open("a") as file:
        file.write(f"{wait_s}\n")
    return len(waits_of(config))


def _file(config: RunTree) -> Path:
    return Path(config.trainer.checkpoint_folder) / "waits"
