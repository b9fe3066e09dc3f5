# SPDX-License-Identifier: Apache-2.0
"""The data of a run of supervised fine-tuning, opened from its config; nothing here needs Ray."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.sft import SFTConfig
from verl.data.bad_rows import REPORT_NAME, BadRowReport
from verl.data.loader import PromptLoader, media_arguments
from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions
from verl.data.sft_dataset import SFTDataset


class SFTLoaders(NamedTuple):
    """Both loaders of a run; None where no files are named."""

    train: PromptLoader[SFTDataset] | None
    val: PromptLoader[SFTDataset] | None


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
    train = val = None
    if data.train_files:
        rows = open_dataset(data.train_files, option="data.train_files")
        train = open_loader(rows, size, shuffle=data.shuffle, drop_last=True, read_on=True)
    if data.val_files:
        rows = open_dataset(data.val_files, option="data.val_files")
        val = open_loader(rows, size, shuffle=False, drop_last=False, read_on=False)
    return SFTLoaders(train, val)


def media_options(config: SFTConfig) -> MediaOptions:
    """How images and videos are read: the same in the loader's processes and in the workers."""
    data = config.data
    return MediaOptions.from_data(
        data, num_video_frames=data.num_video_frames, tokens_per_frame=data.tokens_per_frame
    )
