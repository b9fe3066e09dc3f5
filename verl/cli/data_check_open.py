# SPDX-License-Identifier: Apache-2.0
"""Open the data of a run with its own code, for commands that train nothing.

Needs neither Ray nor weights: only the config, tokenizer and processor of the model are read.
"""

import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.data import dataset as row_dataset
from verl.data import loader as data_loader
from verl.data.bad_rows import REPORT_NAME
from verl.data.loader import (
    Loaders,
    PromptLoader,
    Readers,
    load_readers,
    make_loaders,
    make_sft_loaders,
    media_options,
)
from verl.data.media.cache import MediaCache

MAX_LISTED = 10  # bad rows that an error shows


C = TypeVar("C", PPOConfig, SFTConfig)


def named(loaders: Loaders) -> dict[str, PromptLoader]:
    """Return the loaders by the option of their files."""
    both = {"data.train_files": loaders.train, "data.val_files": loaders.val}
    return {option: loader for option, loader in both.items() if loader is not None}


@contextmanager
def opened_data(config: PPOConfig, folder: Path, *, measures: bool = True) -> Iterator[Loaders]:
    """Open the prompts as a run does, but bad rows and too few of them are no errors here.

    Args:
        config: Config of the run.
        folder: Where bad rows are listed, in `bad_rows.jsonl`; a list of an earlier call is replaced.
        measures: Count the tokens of every prompt with its media, and leave out prompts that are too long;
            without it rows are only rendered, which is faster.

    Raises:
        ValueError: The model's files or the data cannot be used, or no row can; or the folder is the run's.
    """
    data = replace(
        config.data,
        on_bad_row="skip",
        filter_overlong_prompts=measures,
        rollout_batch_size=1,
        mini_rollout_batch_size=None,
    )
    with _opened(config, config.worker.rollout, folder, partial(make_loaders, data)) as loaders:
        yield loaders


@contextmanager
def opened_conversations(config: SFTConfig, folder: Path) -> Iterator[Loaders]:
    """Open the conversations as a run does; see `opened_data`."""
    data = replace(config.data, on_bad_row="skip", filter_overlong_prompts=True)
    with _opened(config, data, folder, partial(make_sft_loaders, data, 1)) as loaders:
        yield loaders


@contextmanager
def _opened(
    config: C, frames: Any, folder: Path, make: Callable[[Readers, Path], Loaders]
) -> Iterator[Loaders]:
    # `frames` is the section with the limits on the frames of a video.
    if folder.absolute() == Path(config.trainer.checkpoint_folder):
        raise ValueError(f"{folder} holds the run's own list of bad rows: name another folder")
    (folder / REPORT_NAME).unlink(missing_ok=True)
    model, template = config.worker.actor.model, config.data.override_chat_template
    with closing(MediaCache(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", owner=True)) as cache, _quiet():
        readers = load_readers(model, template, media_options(config.data, frames), cache)
        try:
            loaders = make(readers, folder)
        except ValueError as error:
            raise ValueError("\n  ".join([str(error), *_listed(folder / REPORT_NAME)])) from error
        yield loaders


@contextmanager
def _quiet() -> Iterator[None]:
    # The command reports bad rows itself.
    loggers = [row_dataset.logger, data_loader.logger]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _listed(report: Path) -> list[str]:
    if not report.exists():
        return []
    rows = [json.loads(line) for line in report.read_text().splitlines()[:MAX_LISTED]]
    return [f"{row['file']}, row {row['row']}: {row['reason']}" for row in rows]
