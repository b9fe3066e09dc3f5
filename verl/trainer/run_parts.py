# SPDX-License-Identifier: Apache-2.0
"""The parts that every run is put together from, whatever it trains."""

import dataclasses
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl.config.model import ModelConfig
from verl.config.trainer import RunConfig
from verl.data.loader import PromptLoader
from verl.data.media.cache import MediaCache
from verl.data.tokenizer import load_processor, load_tokenizer
from verl.logger.base import Run
from verl.logger.tracker import Tracker
from verl.planning.model_sizes import check_trained
from verl.planning.planned_run import PlannedRun
from verl.protocol import DataProto
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.single_controller.worker import Worker
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

# Environment of the workers; what the user sets goes before it. Errors reach the controller by themselves.
WORKER_ENV = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


def check_trained_models(run: PlannedRun) -> None:
    """Say what is trained of each model of a run, before a device is taken.

    Raises:
        ValueError: A pattern matches nothing, or an adapter or optimizer cannot be used.
    """
    for planned in run.models:
        if planned.optim is not None:
            shape = check_trained(planned.model, planned.optim, planned.role, planned.head)
            logger.info("%s: %s", planned.role, shape.trained_text)


def open_cache(stack: ExitStack) -> MediaCache:
    """The run's media cache; it ends with the stack."""
    cache = MediaCache(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", owner=True)
    stack.callback(cache.close)
    return cache


def load_readers(model: ModelConfig, template: str | None) -> tuple[Any, Any | None]:
    """The tokenizer of a model, and its processor if it reads media."""
    assert model.tokenizer_path is not None, "it is the model's, and the config was checked"
    arguments = (model.tokenizer_path, template, model.trust_remote_code)
    return load_tokenizer(*arguments), load_processor(*arguments)


def start_workers(
    stack: ExitStack, pool: ResourcePool, kind: type[Worker], *arguments: Any, trainer: RunConfig
) -> RayWorkerGroup:
    """Start a worker on each device and have them load their models; they end with the stack.

    Args:
        stack: Of the run.
        pool: The devices.
        kind: Of the workers.
        *arguments: For their constructor.
        trainer: Says how long they may hang.
    """
    env = {name: os.environ.get(name, value) for name, value in WORKER_ENV.items()}
    group = RayWorkerGroup(pool, kind, *arguments, env=env, timeout_s=trainer.worker_timeout_s)
    workers = stack.enter_context(group)
    workers.init_model()
    return workers


def open_tracker(config: Any, training_steps: int) -> Tracker:
    """The loggers of a run; `config` is the whole tree, of either kind."""
    trainer: RunConfig = config.trainer
    run = Run(
        project_name=trainer.project_name,
        experiment_name=trainer.experiment_name,
        directory=Path(trainer.checkpoint_folder),
        config=dataclasses.asdict(config),
        total_steps=training_steps,
    )
    return Tracker(trainer.logger, run)


def endless(loader: PromptLoader | None) -> Iterator[DataProto]:
    """Batches of one epoch after another."""
    assert loader is not None, "only a run that validates and trains nothing goes without training rows"
    while True:
        yield from loader
