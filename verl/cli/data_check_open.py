# SPDX-License-Identifier: Apache-2.0
"""Open the data of a run with its own code, for commands that train nothing.

Needs neither Ray nor weights: only the config, tokenizer and processor of the model are read.
"""

import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.data import dataset as row_dataset
from verl.data import loader as data_loader
from verl.data.bad_rows import REPORT_NAME
from verl.data.loader import Loaders, make_loaders
from verl.data.media.cache import MediaCache
from verl.data.sft_loader import SFTLoaders, make_sft_loaders
from verl.data.tokenizer import load_processor, load_tokenizer

MAX_LISTED = 10  # bad rows that an error shows

C = TypeVar("C", PPOConfig, SFTConfig)
L = TypeVar("L", Loaders, SFTLoaders)


def opened_data(config: PPOConfig, folder: Path, *, measures: bool = True) -> AbstractContextManager[Loaders]:
    """Open the prompts as a run does, but bad rows and too few of them are no errors here.

    `folder` gets the list of bad rows, which replaces that of an earlier call. With `measures` the tokens of
    every prompt and its media are counted, and overlong prompts left out; else rows are only rendered.

    Raises:
        ValueError: The model's files or the data cannot be used, or no row can; or the folder is the run's.
    """
    sizes: dict[str, Any] = {"rollout_batch_size": 1, "mini_rollout_batch_size": None}
    data = replace(config.data, on_bad_row="skip", filter_overlong_prompts=measures, **sizes)
    return _opened(config, replace(config, data=data), folder, make_loaders)


def opened_conversations(config: SFTConfig, folder: Path) -> AbstractContextManager[SFTLoaders]:
    """Open the conversations as a run does; see `opened_data`."""
    data = replace(config.data, on_bad_row="skip", filter_overlong_prompts=True)
    worker = replace(config.worker, actor=replace(config.worker.actor, global_batch_size=1))
    return _opened(config, replace(config, data=data, worker=worker), folder, make_sft_loaders)


@contextmanager
def _opened(config: C, lenient: C, folder: Path, make: Callable[[C, Any, Any, MediaCache], L]) -> Iterator[L]:
    if folder.absolute() == Path(config.trainer.checkpoint_folder):
        raise ValueError(f"{folder} holds the run's own list of bad rows: name another folder")
    report = folder / REPORT_NAME
    report.unlink(missing_ok=True)
    lenient = replace(lenient, trainer=replace(config.trainer, save_checkpoint_path=str(folder)))
    model, template = config.worker.actor.model, config.data.override_chat_template
    assert model.tokenizer_path is not None, "it is the model's, and the config was checked"
    tokenizer = load_tokenizer(model.tokenizer_path, template, model.trust_remote_code)
    processor = load_processor(model.tokenizer_path, template, model.trust_remote_code)
    with closing(MediaCache(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", owner=True)) as cache, _quiet():
        try:
            loaders = make(lenient, tokenizer, processor, cache)
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
