# SPDX-License-Identifier: Apache-2.0
"""Open the data of a run with its own code, for commands that train nothing.

Needs neither Ray nor weights: only the config, tokenizer and processor of the model are read.
"""

import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl.agents.setup import schemas_of
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.data import dataset as row_dataset
from verl.data import loader as data_loader
from verl.data.bad_rows import REPORT_NAME
from verl.data.loader import Loaders, make_loaders, make_sft_loaders
from verl.data.media.cache import MediaCache
from verl.data.readers import Readers, load_readers, media_options

MAX_LISTED = 10  # bad rows that an error shows

C = TypeVar("C", PPOConfig, SFTConfig)


def opened_data(config: PPOConfig, folder: Path, *, measures: bool = True) -> AbstractContextManager[Loaders]:
    """Open the prompts as a run does, but bad rows and too few of them are no errors here.

    `folder` gets the list of bad rows, which replaces that of an earlier call. With `measures` the tokens of
    every prompt and its media are counted, and overlong prompts left out; else rows are only rendered.

    Raises:
        ValueError: The model's files or the data cannot be used, or no row can; or the folder is the run's.
    """
    sizes: dict[str, Any] = {"rollout_batch_size": 1, "mini_rollout_batch_size": None}
    data = replace(config.data, on_bad_row="skip", filter_overlong_prompts=measures, streaming=False, **sizes)
    tools = schemas_of(config.worker.rollout.multi_turn)
    return _opened(config, config.worker.rollout, folder, partial(make_loaders, data), tools)


def opened_conversations(config: SFTConfig, folder: Path) -> AbstractContextManager[Loaders]:
    """Open the conversations as a run does; see `opened_data`."""
    data = replace(config.data, on_bad_row="skip", filter_overlong_prompts=True, streaming=False)
    return _opened(config, data, folder, partial(make_sft_loaders, data, 1))


@contextmanager
def _opened(
    config: C,
    frames: Any,
    folder: Path,
    make: Callable[[Readers, Path], Loaders],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Loaders]:
    # `frames` is the section with the limits on the frames of a video.
    if folder.absolute() == Path(config.trainer.checkpoint_folder):
        raise ValueError(f"{folder} holds the run's own list of bad rows: name another folder")
    report = folder / REPORT_NAME
    report.unlink(missing_ok=True)
    model, template = config.worker.actor.model, config.data.override_chat_template
    with closing(MediaCache(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", owner=True)) as cache, _quiet():
        readers = load_readers(model, template, media_options(config.data, frames), cache, tools)
        try:
            loaders = make(readers, folder)
        except ValueError as error:
            listed = report.read_text().splitlines() if report.exists() else []
            rows = [json.loads(line) for line in listed[:MAX_LISTED]]
            reasons = [f"{row['file']}, row {row['row']}: {row['reason']}" for row in rows]
            raise ValueError("\n  ".join([str(error), *reasons])) from error
        yield loaders


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = (row_dataset.logger, data_loader.logger)  # the command reports bad rows itself
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger in loggers:
            logger.setLevel(logging.NOTSET)
