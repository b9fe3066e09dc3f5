# SPDX-License-Identifier: Apache-2.0
"""The end of a run in words, and as the exit status of a command. Imports no torch."""

import dis
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.manifest import resume_from, whole_steps
from verl.checkpoint.tracker import read_record
from verl.config.trainer import RunConfig
from verl.trainer.run.stopping import ENDED_BY
from verl.utils.rank_logger import get_logger

FAILED = 1  # exit status: the machine is unsuitable, or the run ended before its last step
BAD_INPUT = 2  # exit status: an option or a file is wrong; nothing was trained
INTERRUPTED = ENDED_BY + 2  # exit status after Ctrl-C, as in shells
REPORT = "failures.log"  # in the checkpoint folder: each failure, with the stacks of ranks that hung

# Raised by our own code for the user to read; `OSError` covers missing files, full disks and timeouts.
FOR_THE_USER = (ValueError, TypeError, OSError, RuntimeError, ImportError)

logger = get_logger(__name__)


@dataclass(frozen=True)
class ExitStatus:
    """The end of a run."""

    status: int  # 0, `FAILED`, `BAD_INPUT`, or 128 + the signal that ended it
    message: str | None = None  # for the user; None after the last step
    step: int | None = None  # running or done last; None before the run was built
    retryable: bool = False  # a worker or a machine was lost: a restart may help


def exit_status_of(
    error: BaseException,
    trainer: RunConfig,
    step: int | None = None,
    *,
    retryable: bool = False,
    can_resume: bool = True,
) -> ExitStatus:
    """Turn an error of ours, raised in `step` (None is before the first), into an exit status.

    Without `can_resume` the error is that of resuming: the same command would raise it again.
    """
    if step is None:
        return ExitStatus(_status_before_a_run(error), str(error), retryable=retryable)
    message = f"the run failed in step {step}: {error}"
    hint = f"\n\n{resume_hint(trainer)}" if can_resume else ""
    return ExitStatus(FAILED, message + hint, step, retryable)


def _status_before_a_run(error: BaseException) -> int:
    is_machine = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    return FAILED if is_machine else BAD_INPUT


def told(error: Exception) -> int:
    """Tell an error of ours before a run and return its exit status; raise others, which need a traceback."""
    if not raised_by_us(error):
        raise error
    sys.stderr.write(f"{error}\n")
    return _status_before_a_run(error)


def raised_by_us(error: BaseException) -> bool:
    """Return whether a `raise` statement of this package made the error: then its message is enough."""
    # An error that another package or the interpreter raises below us is our mistake.
    assert error.__traceback__ is not None, "it was caught"
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    is_raise = dis.opname[frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and frame.f_globals["__name__"].split(".")[0] == "verl"


def resume_hint(trainer: RunConfig) -> str:
    """Say how to resume from the newest checkpoint that is whole."""
    record = read_record(trainer.checkpoint_folder)
    steps = whole_steps(Path(trainer.checkpoint_folder)) if record is not None else []
    if record is None or not steps:
        return "no checkpoint was saved: `trainer.save_freq` says how often one is"
    is_last = steps[0].name == f"global_step_{record.last_global_step}"
    if is_last and trainer.find_last_checkpoint and trainer.load_checkpoint_path is None:
        return f"the same command resumes from the last checkpoint, {steps[0]}"
    return f"the last checkpoint is {steps[0]}: resume from it with {resume_from(steps[0])}"


def report_failure(trainer: RunConfig, step: int | None, text: str) -> None:
    """Append a failure to the report in the checkpoint folder; a full disk changes no exit status."""
    path = Path(trainer.checkpoint_folder) / REPORT
    moment = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"=== {moment}, step {'unknown' if step is None else step}\n{text}\n\n")
    except OSError as error:
        logger.warning("a failure could not be reported: path=%s cause=%s", path, error)
