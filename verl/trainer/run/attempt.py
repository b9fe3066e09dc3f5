# SPDX-License-Identifier: Apache-2.0
"""One attempt to train, from its config to how it ended."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from ray.exceptions import RayError

from verl.config.trainer import RunTree
from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.run.checkpointing import SavedRun
from verl.trainer.run.exit_status import (
    FOR_THE_USER,
    INTERRUPTED,
    ExitStatus,
    exit_status_of,
    how_to_go_on,
    raised_by_us,
    report_failure,
)
from verl.trainer.run.stopping import StopRequest

C = TypeVar("C", bound=RunTree)


class Trainer(Protocol):
    """A run that was put together, of either kind."""

    @property
    def run_state(self) -> SavedRun: ...
    @property
    def stop(self) -> StopRequest: ...
    def fit(self) -> None: ...


def attempt(
    config: C,
    running: Callable[[C, float], AbstractContextManager[Trainer]],
    patience_s: float | None,
) -> ExitStatus:
    """Train until the last step, a request to stop, or a failure.

    Args:
        config: Of the run.
        running: Puts the run together and takes it apart again; gets the config and the patience.
        patience_s: Of an attempt after a failure: how long to wait, in seconds, for machines that are gone.
            None is the first attempt; what it lacks before it has begun is for the user to mend.

    Raises:
        Exception: An error of this package, which needs its traceback.
    """
    options = config.trainer
    trainer: Trainer | None = None
    try:
        with running(config, patience_s or 0.0) as trainer:
            trainer.fit()
    except FOR_THE_USER as error:
        if not raised_by_us(error):
            raise
        step = None if trainer is None else trainer.run_state.step
        is_loss = isinstance(error, ClusterError)
        if isinstance(error, WorkerError):
            report_failure(options, step, str(error))
            is_loss = error.may_go_away
        has_begun = step is not None or patience_s is not None
        return exit_status_of(error, options, step, may_go_away=is_loss and has_begun)
    except RayError as error:  # what no worker did: the cluster lost its head, or this process its node
        step = None if trainer is None else trainer.run_state.step
        report_failure(options, step, f"Ray: {error}")
        cause = ClusterError(f"Ray cannot go on ({type(error).__name__}): {error}")
        return exit_status_of(cause, options, step, may_go_away=True)
    except KeyboardInterrupt:
        how = "nothing was trained" if trainer is None else how_to_go_on(options)
        return ExitStatus(INTERRUPTED, f"interrupted; {how}")
    step = trainer.run_state.step
    if step >= trainer.run_state.training_steps:
        return ExitStatus(0, step=step)
    message = f"stopped after step {step}; {how_to_go_on(options)}"
    return ExitStatus(trainer.stop.exit_status, message if trainer.stop.signal else None, step)
