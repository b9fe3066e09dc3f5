# SPDX-License-Identifier: Apache-2.0
"""Checks of rollout engines, tools, environments and agents, loaded as in a run."""

import importlib
import inspect
from collections import defaultdict
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from verl.agents.environments.loading import load_environments
from verl.agents.tools.loading import load_tools
from verl.batch_keys import BATCH_KEYS, BatchError
from verl.data.bad_rows import BadRow
from verl.data.dataset import RowDataset
from verl.data.loader import SAMPLERS
from verl.data.order import RowSampler, draw
from verl.data.readers import load_readers, media_options
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.logger.base import Logger
from verl.protocol import DataProto
from verl.trainer.extensions.protocol import (
    ProtocolError,
    UsedExtension,
    check_call,
    described,
    extensions_in,
)
from verl.trainer.extensions.reward_rows import open_unchecked
from verl.utils.registry import Registry
from verl.workers.rollout.interface import RolloutEngine

# The names of these are files only, or shipped ones that need no check.
TOOLS: Registry[Any] = Registry("worker.rollout.multi_turn.tools")
ENVIRONMENTS: Registry[Any] = Registry("worker.rollout.multi_turn.environment")
AGENTS: Registry[Any] = Registry("worker.rollout.multi_turn.agent")


def check_engine(engine: Any, _used: UsedExtension, _config: Any) -> None:
    """Look at the methods of an engine, which is built only in the workers."""
    check_call(engine, (None, None), "the section `worker.rollout` and an EngineSetup")
    if isinstance(engine, type):
        names = [name for name, value in vars(RolloutEngine).items() if inspect.isfunction(value)]
        absent = [name for name in names if not name.startswith("_") and not hasattr(engine, name)]
        if missing := [*absent, *sorted(getattr(engine, "__abstractmethods__", ()))]:
            raise ProtocolError(f"must have the methods {missing}")


def check_tool(_tool: Any, used: UsedExtension, config: Any) -> None:
    """Load the run's tools as the engines do, all at once: their names must differ."""
    if used != next(one for one in extensions_in(config) if one.kind == used.kind):
        return
    try:
        load_tools(config.worker.rollout.multi_turn)
    except ValueError as error:
        raise ProtocolError(f"is not usable: {error}") from error


def check_environment(_environment: Any, _used: UsedExtension, config: Any) -> None:
    """Load the run's environment as the engines do, without making one: rows may give arguments."""
    try:
        load_environments(config.worker.rollout.multi_turn)
    except ValueError as error:
        raise ProtocolError(f"is not usable: {error}") from error


def check_agent(agent: Any, used: UsedExtension, config: Any) -> None:
    """Check that a function takes a row, the policy and `agent_kwargs`."""
    try:
        inspect.signature(agent).bind({}, object(), **config.worker.rollout.multi_turn.agent_kwargs)
    except TypeError as error:
        raise ProtocolError(f"cannot be called so: {error}") from error


def check_dataset(kind: Any, _used: UsedExtension, config: Any) -> None:
    """Render and collate the first row."""
    built_in: type[RowDataset] = RLHFDataset if hasattr(config.worker, "rollout") else SFTDataset
    if not (isinstance(kind, type) and issubclass(kind, built_in)):
        name = f"{built_in.__module__}.{built_in.__name__}"
        raise ProtocolError(f"must be a class derived from {name}, got {described(kind)}")
    dataset = _open_first_rows(kind, config)
    item = None if dataset is None else dataset[0]
    if dataset is None or item is None or isinstance(item, BadRow):
        return  # opening the data lists the bad rows, and files that are missing
    missing = [name for name in kind.tensors if not isinstance(item.get(name), Tensor)]
    if missing:
        raise ProtocolError(f"must make items with the tensors {list(kind.tensors)}, and lacks {missing}")
    try:
        DataProto.from_single_dict(dataset.collate([item])).check()
    except BatchError as error:
        raise ProtocolError(f"must make batches of the key table: {error}") from error


def check_logger(kind: Any, used: UsedExtension, _config: Any) -> None:
    """Look at the methods of a logger, which opens its files or its service only in the run."""
    if not (isinstance(kind, type) and issubclass(kind, Logger)):
        raise ProtocolError(f"must be a class derived from Logger, got {described(kind)}")
    if kind.module:
        importlib.import_module(kind.module)
    check_call(kind, (None,), "a Run")
    for name, method in vars(Logger).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments = list(inspect.signature(method).parameters)
            check_call(getattr(kind, name), tuple(arguments), f"{arguments}", name)


def check_sampler(kind: Any, _used: UsedExtension, config: Any) -> None:
    """Draw a few rows, and more from a stored state."""
    if not (isinstance(kind, type) and issubclass(kind, RowSampler)):
        raise ProtocolError(f"must be a class derived from RowSampler, got {described(kind)}")
    sampler, resumed = _tiny_sampler(kind, config.data), _tiny_sampler(kind, config.data)
    num_rows = 4 * (len(config.data.files_by_source("train_files")) or 1)
    for row in draw(sampler, 4, num_rows):
        sampler.see(row, defaultdict(lambda: [0.0, 1.0], overall=[0.0, 1.0]))  # and any other name
    for name, value in sampler.metrics().items():
        if not isinstance(value, int | float):
            raise ProtocolError(f"must return numbers as metrics, got {described(value)} for {name!r}")
    file = BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    further = [draw(each, 2, num_rows) for each in (sampler, resumed)]  # fewer: what a batch lacks
    if further[0] != further[1]:
        raise ProtocolError("must draw the same rows after `load_state_dict`, got {} and {}".format(*further))


def check_scores_seen(data: Any, names: set[str]) -> None:
    """Show the run's sampler, if it has one, scores of the names that the reward function returned."""
    if data.sampler is None or not names:
        return
    try:
        _tiny_sampler(SAMPLERS[data.sampler], data).see(0, {name: [0.0, 1.0] for name in names})
    except Exception as error:  # whatever code of the user raises
        raise ValueError(f"`data.sampler` cannot use the reward function's scores: {error!r}") from error


def _tiny_sampler(kind: type[RowSampler], data: Any) -> RowSampler:
    names = list(data.files_by_source("train_files")) or [""]
    weights = {name: data.sources[name].weight if name else 1.0 for name in names}
    sources = {name: range(4 * place, 4 * place + 4) for place, name in enumerate(names)}
    return kind(sources, weights, data.seed, **data.sampler_kwargs)


def _open_first_rows(kind: type[RowDataset], config: Any) -> RowDataset | None:
    """Open the rows of a run without checking them; None if the model's files cannot be read."""
    data = config.data
    frames = getattr(config.worker, "rollout", data)  # the section that limits video frames
    try:
        media = media_options(data, frames)
        readers = load_readers(config.worker.actor.model, data.override_chat_template, media, None)
    except (OSError, ValueError):
        return None
    reserved: dict[str, Any] = {"reserved": BATCH_KEYS} if issubclass(kind, RLHFDataset) else {}
    return open_unchecked(kind, data, readers, **reserved)
