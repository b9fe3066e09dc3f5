# SPDX-License-Identifier: Apache-2.0
"""Puts a run of supervised fine-tuning together from its config, and takes it apart again.

The order is that of failing early: data and cluster are checked before a model is loaded.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.trainer.data_loader import PromptLoader, media_arguments
from verl.trainer.exports import export_checkpoints
from verl.trainer.run_parts import endless, load_readers, open_cache, open_tracker, start_workers
from verl.trainer.saved_run import SavedRun
from verl.trainer.sft_config import SFTConfig
from verl.trainer.sft_plan import count_sft_steps
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.bad_rows import REPORT_NAME, BadRowReport
from verl.utils.device import resolve_device
from verl.utils.media_cache import MediaCache
from verl.utils.multimodal import MediaOptions
from verl.utils.rank_logger import get_logger
from verl.utils.sft_dataset import SFTDataset
from verl.workers.model_sizes import check_trained
from verl.workers.run_options import ModelRunOptions
from verl.workers.sft_worker import SFTWorker

logger = get_logger(__name__)


class SFTLoaders(NamedTuple):
    """Both loaders of a run."""

    train: PromptLoader[SFTDataset]
    val: PromptLoader[SFTDataset] | None  # None where no files are named


@contextmanager
def running_sft(config: SFTConfig) -> Iterator[SFTTrainer]:
    """Start everything a run needs and hand out its trainer; on leaving, end all of it.

    Example::

        with running_sft(load_config(SFTConfig, sys.argv[1:])) as trainer:
            trainer.fit()

    Raises:
        ValueError: The data cannot be used.
        ClusterError: The cluster is too small, or cannot be reached.
    """
    with ExitStack() as stack:
        actor = config.worker.actor
        export_checkpoints(config.worker)
        logger.info("actor: %s", check_trained(actor.model, actor.optim, "actor").trained_text)
        device = resolve_device(config.trainer.device)
        pool = _join_cluster(config, device, stack)
        cache = open_cache(stack)
        readers = load_readers(actor.model, config.data.override_chat_template)
        loaders = make_sft_loaders(config, *readers, cache)
        training_steps = count_sft_steps(config, len(loaders.train.dataset))
        assert training_steps is not None, "the number of rows is known"

        options = ModelRunOptions(
            device=device,
            training_steps=training_steps,
            media=media_options(config),
            media_cache=cache,
            override_chat_template=config.data.override_chat_template,
            seed=config.data.seed,
        )
        workers = start_workers(stack, pool, SFTWorker, config.worker, options, trainer=config.trainer)
        tracker = stack.enter_context(open_tracker(config, training_steps))
        run_state = SavedRun(config.trainer, training_steps, workers, loaders.train)
        yield SFTTrainer(config, workers, endless(loaders.train), loaders.val, run_state, tracker)
        if config.trainer.ray_timeline is not None:
            ray.timeline(config.trainer.ray_timeline)


def make_sft_loaders(
    config: SFTConfig, tokenizer: Any, processor: Any | None, cache: MediaCache | None = None
) -> SFTLoaders:
    """Open the data of a run: both in batches of one step's rows, those for validation in their own order.

    Args:
        config: Of the run.
        tokenizer: Of the model.
        processor: Of the model if it reads media.
        cache: The run's media cache; None keeps decoded media in the process that decoded them.

    Raises:
        ValueError: Data cannot be used.
    """
    data, size = config.data, config.worker.actor.global_batch_size
    open_dataset = partial(
        SFTDataset,
        tokenizer=tokenizer,
        processor=processor,
        config=data,
        row_timeout_s=data.row_timeout_s,
        report=BadRowReport(Path(config.trainer.checkpoint_folder) / REPORT_NAME),
        **media_arguments(config.worker.actor.model, media_options(config), processor, cache),
    )
    open_loader = partial(PromptLoader, seed=data.seed, num_workers=data.num_workers)
    train = open_dataset(data.train_files, option="data.train_files")
    val = None
    if config.has_validation:
        rows = open_dataset(data.val_files, option="data.val_files")
        val = open_loader(rows, size, shuffle=False, drop_last=False, read_on=False)
    return SFTLoaders(open_loader(train, size, shuffle=data.shuffle, drop_last=True, read_on=True), val)


def media_options(config: SFTConfig) -> MediaOptions:
    """How images and videos are read: the same in the loader's processes and in the workers."""
    data = config.data
    return MediaOptions.from_data(
        data, num_video_frames=data.num_video_frames, tokens_per_frame=data.tokens_per_frame
    )


def _join_cluster(config: SFTConfig, device: str, stack: ExitStack) -> ResourcePool:
    if not ray.is_initialized():
        connect()
        stack.callback(ray.shutdown)
    pool = ResourcePool(config.trainer.nnodes, config.trainer.n_gpus_per_node, device)
    pool.check()
    return pool
