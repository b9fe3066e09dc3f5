# SPDX-License-Identifier: Apache-2.0
"""Puts a run of supervised fine-tuning together from its config, and takes it apart again.

The order is that of failing early: data and cluster are checked before a model is loaded.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import ray

from verl.config.sft import SFTConfig
from verl.data.sft_loader import make_sft_loaders, media_options
from verl.distributed.device import resolve_device
from verl.planning.report import resolve_auto_sizes
from verl.planning.sft import planned_sft
from verl.planning.sft_plan import count_sft_steps
from verl.trainer.exports import export_checkpoints
from verl.trainer.run.checkpointing import SavedRun
from verl.trainer.run.cluster_join import join_cluster
from verl.trainer.run_parts import (
    check_trained_models,
    endless,
    load_readers,
    open_cache,
    open_tracker,
    start_workers,
)
from verl.trainer.sft.sft_trainer import SFTTrainer
from verl.workers.base_worker import ModelRunOptions
from verl.workers.sft_worker import SFTWorker


@contextmanager
def running_sft(config: SFTConfig, patience_s: float = 0.0) -> Iterator[SFTTrainer]:
    """Start everything a run needs and hand out its trainer; on leaving, end all of it.

    Args:
        config: Of the run; with `trainer.elastic` it may run on fewer devices.
        patience_s: How long to wait, in seconds, for a cluster that is too small or cannot be reached.

    Example::

        with running_sft(load_config(SFTConfig, sys.argv[1:])) as trainer:
            trainer.fit()

    Raises:
        ValueError: The data cannot be used.
        ClusterError: The cluster is too small, or cannot be reached.
    """
    with ExitStack() as stack:
        export_checkpoints(config.worker)
        check_trained_models(planned_sft(config))
        device = resolve_device(config.trainer.device)
        config, pool = join_cluster(config, device, patience_s, stack)
        worker = resolve_auto_sizes(config, planned_sft, device).worker
        cache = open_cache(stack)
        readers = load_readers(config.worker.actor.model, config.data.override_chat_template)
        loaders = make_sft_loaders(config, *readers, cache)
        training_steps = count_sft_steps(config, len(loaders.train.dataset) if loaders.train else 0) or 0

        options = ModelRunOptions(
            device=device,
            training_steps=training_steps,
            media=media_options(config),
            media_cache=cache,
            override_chat_template=config.data.override_chat_template,
            seed=config.data.seed,
        )
        workers = start_workers(stack, pool, SFTWorker, worker, options, trainer=config.trainer)
        tracker = stack.enter_context(open_tracker(config, training_steps))
        run_state = SavedRun(config.trainer, training_steps, workers, loaders.train)
        yield SFTTrainer(config, workers, endless(loaders.train), loaders.val, run_state, tracker)
        if config.trainer.ray_timeline is not None:
            ray.timeline(config.trainer.ray_timeline)
