# SPDX-License-Identifier: Apache-2.0
"""Imports of the worker processes, ahead of the workers. This module itself imports nothing heavy."""

from collections.abc import Callable
from functools import partial

from verl.config.worker import WorkerConfig


def imports_of(worker: WorkerConfig) -> Callable[[str], None]:
    """Return the imports of the processes that train by reinforcement learning."""
    return partial(import_worker, worker.rollout.name) if worker.hybrid_engine else import_training_worker


def import_worker(engine: str, device: str) -> None:
    """Import the worker that trains and samples, and its rollout engine, `worker.rollout.name`."""
    import verl.workers.fsdp_worker  # noqa: F401, PLC0415
    from verl.workers.rollout.engines import import_rollout_engine  # noqa: PLC0415

    import_rollout_engine(engine, device)


def import_training_worker(device: str) -> None:
    """Import the worker that trains on what others sample."""
    import verl.workers.training_worker  # noqa: F401, PLC0415


def import_rollout_worker(engine: str, device: str) -> None:
    """Import the worker that only samples, and its engine."""
    import verl.workers.rollout_worker  # noqa: F401, PLC0415
    from verl.workers.rollout.engines import import_rollout_engine  # noqa: PLC0415

    import_rollout_engine(engine, device)


def import_sft_worker(device: str) -> None:
    """Import the worker of supervised fine-tuning."""
    import verl.workers.sft_worker  # noqa: F401, PLC0415
