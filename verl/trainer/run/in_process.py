# SPDX-License-Identifier: Apache-2.0
"""A run inside a process of the user's, where errors stay exceptions."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from ray.exceptions import RayError

from verl.config.trainer import RunConfig
from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.command import check_run
from verl.trainer.run.exit_status import FOR_THE_USER, raised_by_us, report_failure, resume_hint
from verl.trainer.run.run_lock import locked_run_folder
from verl.trainer.training_loop import TrainingLoop
from verl.utils.version_check import check_versions

T = TypeVar("T", bound=TrainingLoop)


@contextmanager
def run_in_process(options: RunConfig, engine: str, started: AbstractContextManager[T]) -> Iterator[T]:
    """Open a run for the block, and close all that it started.

    Args:
        engine: Name of the rollout engine whose packages are checked.
        started: Checks the run, joins the cluster and builds the trainer.

    Raises:
        ValueError: An option or a file is wrong, as the command would say.
        WorkerError: A worker failed; its traceback is in the message.
        ClusterError: Machines or processes were lost.
    """
    check_versions(engine)
    with locked_run_folder(options):
        check_run(options)
        trainer: T | None = None
        try:
            with started as trainer:
                try:
                    yield trainer
                finally:
                    trainer.close()
        except (
            RayError
        ) as error:  # not raised by a worker: the cluster lost its head, or this process its node
            report_failure(options, _step_of(trainer), f"Ray: {error}")
            raise ClusterError(f"Ray failed ({type(error).__name__}): {error}") from error
        except FOR_THE_USER as error:
            if isinstance(error, WorkerError):
                report_failure(options, _step_of(trainer), str(error))
            if trainer is not None and raised_by_us(error):
                error.add_note(f"in step {trainer.run_state.step}; {resume_hint(options)}")
            raise


def _step_of(trainer: TrainingLoop | None) -> int | None:
    return None if trainer is None else trainer.run_state.step
