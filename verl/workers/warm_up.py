# SPDX-License-Identifier: Apache-2.0
"""Imports of the worker processes, ahead of the workers. This module itself imports nothing heavy."""


def import_worker(engine: str, device: str) -> None:
    """Import the worker of reinforcement learning and its rollout engine, `worker.rollout.name`."""
    import verl.workers.fsdp_worker  # noqa: F401, PLC0415
    from verl.workers.rollout.engines import import_rollout_engine  # noqa: PLC0415

    import_rollout_engine(engine, device)


def import_sft_worker(device: str) -> None:
    """Import the worker of supervised fine-tuning."""
    import verl.workers.sft_worker  # noqa: F401, PLC0415
