# SPDX-License-Identifier: Apache-2.0
"""One run without restarts, from config to end: as an exit status, or inside a user's process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from verl.config.data import DataConfig
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.config.trainer import RunConfig, RunTree, TrainerConfig
from verl.planning.planned_run import planned_ppo, planned_sft
from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.first_look import check_reward
from verl.trainer.prepare import prepare_run
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
from verl.utils.imports import deferred
from verl.workers.warm_up import import_worker, imports_of

if TYPE_CHECKING:  # this module is imported before torch
    from verl.trainer.training_loop import TrainingLoop

downloaded = deferred("verl.diffusion.families.registry", "downloaded")  # imports torch


def run_once(config: RunTree, wait_s: float | None = None) -> ExitStatus:
    """Train until the last step, a request to stop, or a failure.

    Args:
        wait_s: Seconds that a restart waits for missing machines; None in a first run, for which the user
            must provide them.
    """
    options = config.trainer
    trainer: TrainingLoop | None = None
    try:
        with ExitStack() as stack:
            trainer = open_trainer(config, stack, wait_s)
            trainer.fit()
            finished = trainer.finished()
    except FOR_THE_USER as error:
        if not raised_by_us(error):
            raise  # our own mistake, which needs its traceback
        step = _step_of(trainer)
        is_loss = isinstance(error, ClusterError)
        if isinstance(error, WorkerError):
            report_failure(options, step, str(error))
            is_loss = error.may_go_away
        has_begun = step is not None or wait_s is not None
        can_resume = is_loss or (trainer is not None and trainer.run_state.is_loaded)
        return exit_status_of(error, options, step, retryable=is_loss and has_begun, can_resume=can_resume)
    except RayError as error:  # not raised by a worker: the cluster lost its head, or this process its node
        step = _step_of(trainer)
        return exit_status_of(_ray_failure(config, error, step), options, step, retryable=True)
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


@contextmanager
def run_in_process(config: RunTree) -> "Iterator[TrainingLoop]":
    """Open a run for the block, where errors stay exceptions, and close all that it started.

    Raises:
        ValueError: An option or a file is wrong, as the command would say.
        WorkerError: A worker failed; its traceback is in the message.
        ClusterError: Machines or processes were lost.
    """
    trainer: TrainingLoop | None = None
    try:
        with ExitStack() as stack:
            trainer = open_trainer(config, stack)
            stack.callback(trainer.close)
            yield trainer
    except RayError as error:  # see `run_once`
        raise _ray_failure(config, error, _step_of(trainer)) from error
    except FOR_THE_USER as error:
        if isinstance(error, WorkerError):
            report_failure(config.trainer, _step_of(trainer), str(error))
        if trainer is not None and raised_by_us(error):
            error.add_note(f"in step {trainer.run_state.step}; {resume_hint(config.trainer)}")
        raise


def open_trainer(config: RunTree, stack: ExitStack, wait_s: float | None = None) -> "TrainingLoop":
    """Prepare a run and build its trainer; the stack ends its processes. See `run_once`."""
    if isinstance(config, SFTConfig):
        warm_up = partial(import_worker, "sft_worker", None)
        sft_run = prepare_run(config, planned_sft, stack, wait_s or 0.0, warm_up=warm_up)
        from verl.trainer.setup import build_sft_trainer  # noqa: PLC0415 - imported while Ray started

        trainer = build_sft_trainer(sft_run, stack)
    else:
        assert isinstance(config, PPOConfig), "there are two kinds of training"
        if config.trainer.diffusion:
            downloaded(config.worker.actor.model)
        open_viewer(config.data, config.trainer, stack)
        check = partial(check_reward, config.data, config.worker, config.reward_servers)
        check = check if wait_s is None else None  # a restart uses what was checked
        run = prepare_run(config, planned_ppo, stack, wait_s or 0.0, check, imports_of(config.worker))
        from verl.trainer.setup import build_trainer  # noqa: PLC0415 - imported while Ray started

        trainer = build_trainer(run, stack)
    stack.enter_context(timeline_at_end(config.trainer))
    return trainer


@contextmanager
def timeline_at_end(trainer: RunConfig) -> Iterator[None]:
    """Write `trainer.ray_timeline`, if it is set, when the block ends without an error."""
    yield
    if trainer.ray_timeline is not None:
        ray.timeline(trainer.ray_timeline)


def open_viewer(data: DataConfig, trainer: TrainerConfig, stack: ExitStack) -> None:
    """Serve the rollouts of the run, until the stack ends, if `trainer.viewer_port` is set."""
    if trainer.viewer_port is None:
        return
    from verl.viewer.process import viewer_process  # noqa: PLC0415 - a web server, for those who want it

    videos = [Path(one) for one in {data.image_dir, data.video_dir, data.audio_dir} if one is not None]
    stack.enter_context(viewer_process(Path(trainer.checkpoint_folder), trainer.viewer_port, videos))


def _ray_failure(config: RunTree, error: RayError, step: int | None) -> ClusterError:
    report_failure(config.trainer, step, f"Ray: {error}")
    return ClusterError(f"Ray failed ({type(error).__name__}): {error}")


def _step_of(trainer: "TrainingLoop | None") -> int | None:
    return None if trainer is None else trainer.run_state.step
