# SPDX-License-Identifier: Apache-2.0
"""Imports of the worker processes, ahead of the workers. This module itself imports nothing heavy."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from verl.config.worker import WorkerConfig


def imports_of(worker: WorkerConfig) -> Callable[[str], None]:
    """Return the imports of the processes that train by reinforcement learning."""
    if worker.hybrid_engine:
        return partial(import_worker, "fsdp_worker", worker.rollout.name)
    return partial(import_worker, "training_worker", None)


def import_worker(module: str, engine: str | None, device: str) -> None:
    """Import a worker's module of this folder, and its rollout engine if it has one."""
    import_module(f"verl.workers.{module}")
    if engine is not None:
        from verl.workers.rollout.engines import import_rollout_engine  # noqa: PLC0415

        import_rollout_engine(engine, device)
