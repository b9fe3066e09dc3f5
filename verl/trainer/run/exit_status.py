# SPDX-License-Identifier: Apache-2.0
"""How an attempt to train ended, in words and as the exit status of a command; imports no torch."""

import dis
import time
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.tracker import read_record
from verl.config.trainer import RunConfig
from verl.trainer.run.stopping import ENDED_BY

FAILED = 1  # exit status: the machine does not do, or the run ended before its last step
BAD_INPUT = 2  # exit status: an option or a file is wrong; nothing was trained
INTERRUPTED = ENDED_BY + 2  # exit status after Ctrl-C, as shells have it
REPORT = "failures.log"  # in the checkpoint folder: what failed when, with the stacks of ranks that hung

# What our own code raises for the user to read; `OSError` holds missing files, full disks and timeouts.
FOR_THE_USER = (ValueError, TypeError, OSError, RuntimeError, ImportError)


@dataclass(frozen=True)
class ExitStatus:
    """How an attempt to train ended.

    Attributes:
        status: Exit status: 0; 2 for bad input, before anything was trained; 1 for a machine that does not
            do or a run that failed; 128 + the signal that ended it.
        message: For the user; None after the last step.
        step: The step that was under way or done last; None before the run was put together.
        may_go_away: Whether another attempt may do better: a worker or a machine was lost.
    """

    status: int
    message: str | None = None
    step: int | None = None
    may_go_away: bool = False


def exit_status_of(
    error: BaseException, trainer: RunConfig, step: int | None = None, *, may_go_away: bool = False
) -> ExitStatus:
    """What an error of ours comes to, in the step that was under way; None is before the first."""
    if step is None:
        is_machine = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        return ExitStatus(FAILED if is_machine else BAD_INPUT, str(error), may_go_away=may_go_away)
    message = f"the run failed in step {step}: {error}\n\n{how_to_go_on(trainer)}"
    return ExitStatus(FAILED, message, step, may_go_away)


def raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` statement of this package made the error: then its message says everything.

    What another package or the interpreter raises inside of ours is our mistake, and needs its traceback.
    """
    assert error.__traceback__ is not None, "it was caught"
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    is_raise = dis.opname[frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and frame.f_globals["__name__"].split(".")[0] == "verl"


def how_to_go_on(trainer: RunConfig) -> str:
    """Which command continues the run."""
    record = read_record(trainer.checkpoint_folder)
    if record is None or record.last_global_step is None:
        return "no checkpoint was saved: `trainer.save_freq` says how often one is"
    folder = f"{trainer.checkpoint_folder}/global_step_{record.last_global_step}"
    if trainer.find_last_checkpoint and trainer.load_checkpoint_path is None:
        return f"the same command goes on from the last checkpoint, {folder}"
    return f"the last checkpoint is {folder}: go on from it with `trainer.load_checkpoint_path={folder}`"


def report_failure(trainer: RunConfig, step: int | None, text: str) -> None:
    """Add what failed to the report beside the checkpoints."""
    folder = Path(trainer.checkpoint_folder)
    folder.mkdir(parents=True, exist_ok=True)
    moment = time.strftime("%Y-%m-%d %H:%M:%S")
    with (folder / REPORT).open("a") as file:
        file.write(f"=== {moment}, step {'unknown' if step is None else step}\n{text}\n\n")
