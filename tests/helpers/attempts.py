# SPDX-License-Identifier: Apache-2.0
"""Functions for the supervisor that train nothing; a child process imports them, so without torch."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from verl.config.sft import SFTConfig
from verl.config.trainer import RunTree
from verl.trainer.run.exit_status import ExitStatus
from verl.trainer.run.stopping import StopRequest
from verl.trainer.run.supervisor import Supervisor

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


def start_for_ever(config: RunTree, wait_s: float | None) -> ExitStatus:
    """Ignore SIGTERM, as Ray does while it starts."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (_file(config).parent / "starting").write_text(f"{os.getpid()}")
    time.sleep(1000)
    return DONE


def train_until_stopped(config: RunTree, wait_s: float | None) -> ExitStatus:
    stop = StopRequest()
    with stop.listening():
        (_file(config).parent / "training").write_text(f"{os.getpid()}")
        while not stop.signal:
            time.sleep(0.01)
    (_file(config).parent / "saved").write_text(stop.signal.name)
    return DONE


def supervise(name: str, folder: str) -> None:
    """Supervise one of these functions, in a process to be killed."""
    options = {"max_restarts": 1, "save_checkpoint_path": folder}
    config = replace(SFTConfig(), trainer=replace(SFTConfig().trainer, **options))
    Supervisor(config, globals()[name]).run()


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
