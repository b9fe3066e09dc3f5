# SPDX-License-Identifier: Apache-2.0
"""One run, from its config to its exit status, without restarts."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from verl.config.trainer import RunConfig
from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.run.end_report import print_end_report
from verl.trainer.run.exit_status import (
    FOR_THE_USER,
    INTERRUPTED,
    ExitStatus,
    exit_status_of,
    raised_by_us,
    report_failure,
    resume_hint,
)

if TYPE_CHECKING:  # this module is imported before torch
    from verl.trainer.training_loop import TrainingLoop


def run_once(
    options: RunConfig,
    prepared: AbstractContextManager[tuple[Any, ...]],
    start: "Callable[..., AbstractContextManager[TrainingLoop]]",
    *,
    is_restart: bool,
) -> ExitStatus:
    """Train until the last step, a request to stop, or a failure.

    Args:
        prepared: What `start` takes: the config of the run, its devices and processes.
        start: Builds the trainer.
        is_restart: Machines may be missing before the first step; in a first run the user must provide them.
    """
    trainer: TrainingLoop | None = None
    try:
        with prepared as run, start(*run) as trainer:
            trainer.fit()
            finished = trainer.finished()
    except FOR_THE_USER as error:
        if not raised_by_us(error):
            raise  # our own mistake, which needs its traceback
        step = None if trainer is None else trainer.run_state.step
        is_loss = isinstance(error, ClusterError)
        if isinstance(error, WorkerError):
            report_failure(options, step, str(error))
            is_loss = error.may_go_away
        has_begun = step is not None or is_restart
        can_resume = is_loss or (trainer is not None and trainer.run_state.is_loaded)
        return exit_status_of(error, options, step, retryable=is_loss and has_begun, can_resume=can_resume)
    except RayError as error:  # not raised by a worker: the cluster lost its head, or this process its node
        step = None if trainer is None else trainer.run_state.step
        report_failure(options, step, f"Ray: {error}")
        cause = ClusterError(f"Ray failed ({type(error).__name__}): {error}")
        return exit_status_of(cause, options, step, retryable=True)
    except KeyboardInterrupt:
        hint = "nothing was trained" if trainer is None else resume_hint(options)
        return ExitStatus(INTERRUPTED, f"interrupted; {hint}")
    step = trainer.run_state.step
    is_validated = options.val_only and not trainer.stop.signal
    if step >= trainer.run_state.training_steps or is_validated:
        print_end_report(options, finished)
        return ExitStatus(0, step=step)
    message = f"stopped after step {step}; {resume_hint(options)}"
    return ExitStatus(trainer.stop.exit_status, message if trainer.stop.signal else None, step)
