# SPDX-License-Identifier: Apache-2.0
"""Batches of prompts in an order that a resumed run continues exactly.

The order of an epoch follows from `data.seed` and the number of the epoch, so a loader's position is two
numbers: the epoch and how many rows of it were used. A row that turns out bad when it is read
(`data.on_bad_row=skip`) is used up like any other but leaves no prompt: the batch is filled with the rows
that follow, so that every batch has the same size, an epoch gets shorter, and no row ever stands in for
another.

Bad rows, those found at the start and those found on the way, are listed in the checkpoint folder.

Processes read ahead: while a step works on a batch they decode the media of the next one into the cache, at
the end of an epoch those of the next epoch. What was read ahead is no part of the position, so processes that
died are replaced by others which read the same rows again.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig

from verl.batch_keys import BATCH_KEYS
from verl.config.model import ModelConfig
from verl.config.ppo import PPOConfig
from verl.data.bad_rows import BAD_ROW_REMEDY, REPORT_NAME, BadRow, BadRowReport
from verl.data.dataset import RowDataset
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.messages import BadRowError
from verl.data.rl_dataset import RLHFDataset
from verl.models.position_ids import MropeConstants, position_ids_for
from verl.protocol import DataProto
from verl.utils.rank_logger import get_logger

D = TypeVar("D", bound=RowDataset)

DEAD_READER = "DataLoader worker (pid"  # how torch begins to say that a process of its own ended

logger = get_logger(__name__)


class PromptLoader(Generic[D]):
    """Iterates over one epoch of batches, from where the last iteration stopped.

    Args:
        dataset: Prompts, or other rows.
        batch_size: Rows of a batch.
        shuffle: Draw the rows in random order, a new one for each epoch.
        seed: Of the order.
        drop_last: Leave out the rows at the end of an epoch that do not fill a batch.
        read_on: Epochs follow one another: read ahead beyond the end of an epoch, and keep the processes.
        num_workers: Processes that read rows, each two rows or its share of a batch ahead; 0 reads in this
            process, and only what is asked for.

    Attributes:
        bad_rows: Rows that turned out bad when they were read; each is listed once.
    """

    def __init__(
        self,
        dataset: D,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        read_on: bool,
        num_workers: int,
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.read_on, self.num_workers = drop_last, read_on, num_workers
        self.epoch = 0
        self.position = 0  # rows of this epoch that were used
        self.bad_rows: dict[int, BadRow] = {}
        self._rows: Iterator[dict[str, Any] | BadRow] = iter(())
        self._next: tuple[int, int] | None = None  # epoch and place in it of the row that `_rows` gives next

    def __len__(self) -> int:
        """Batches of an epoch without bad rows."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    def __iter__(self) -> Iterator[DataProto]:
        items: list[dict[str, Any]] = []
        first = used = self.position  # `used` counts rows read, in batches that were not handed out yet too
        while used < len(self.dataset):
            item = self._read(used)
            used += 1
            if isinstance(item, BadRow):
                self._leave_out(item)
                continue
            items.append(item)
            if len(items) == self.batch_size:
                self.position = used
                yield DataProto.from_single_dict(self.dataset.collate(items))
                items = []
        if items and not self.drop_last:
            self.position = used
            yield DataProto.from_single_dict(self.dataset.collate(items))
        if first == 0 and self.position == 0:
            raise ValueError(
                f"no batch of {self.batch_size} prompts can be filled: {len(self.bad_rows)} of"
                f" {len(self.dataset)} rows are bad, first {next(iter(self.bad_rows.values()), None)}"
            )
        self.epoch, self.position = self.epoch + 1, 0
        if not self.read_on:
            self._rows, self._next = iter(()), None  # ends the processes

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that was handed out."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "num_rows": len(self.dataset),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position; the next iteration starts there.

        Raises:
            ValueError: The data or its order differ from those the position belongs to.
        """
        found = {"seed": self.seed, "num_rows": len(self.dataset)}
        changed = {name: (state[name], value) for name, value in found.items() if state[name] != value}
        if changed:
            raise ValueError(
                f"the data differ from the checkpoint's, (then, now): {changed}: resume with the same"
                " `data.train_files`, `data.seed` and filter options"
            )
        self.epoch, self.position = state["epoch"], state["position"]

    def _read(self, place: int) -> dict[str, Any] | BadRow:
        """The row at a place of this epoch; the processes go on with those that follow."""
        if self._next != (self.epoch, place):
            self._rows = self._open(place)
        self._next = None  # nowhere, should reading fail
        row = self._take(place)
        is_last = place + 1 == len(self.dataset)
        self._next = (self.epoch + 1, 0) if is_last else (self.epoch, place + 1)
        return row

    def _take(self, place: int) -> dict[str, Any] | BadRow:
        """The row that the processes give next; once, if they died, from others in their place.

        Raises:
            RuntimeError: The others died too.
        """
        try:
            return next(self._rows)
        except RuntimeError as error:
            if not str(error).startswith(DEAD_READER):
                raise
            logger.warning("processes that read rows died and are replaced: place=%d cause=%s", place, error)
        self._rows = self._open(place)
        try:
            return next(self._rows)
        except RuntimeError as error:
            if not str(error).startswith(DEAD_READER):
                raise
            raise RuntimeError(
                f"the processes that read rows died twice before the row at place {place} of epoch"
                f" {self.epoch} ({error}): lower `data.num_workers` ({self.num_workers}) if memory is short"
            ) from error

    def _open(self, place: int) -> Iterator[dict[str, Any] | BadRow]:
        workers = min(self.num_workers, len(self.dataset))
        rows = DataLoader(
            self.dataset,
            batch_size=None,  # one row at a time, so that all workers read for the same batch
            sampler=_order(
                len(self.dataset), self.epoch, place, self.seed if self.shuffle else None, self.read_on
            ),
            collate_fn=partial(_as_arrays, self.dataset.tensors),
            num_workers=workers,
            prefetch_factor=None if workers == 0 else max(2, -(-self.batch_size // workers)),
        )
        with _own_sigchld():
            return iter(rows)

    def _leave_out(self, row: BadRow) -> None:
        if self.dataset.report is not None:
            self.dataset.report.add([row])
        if self.dataset.config.on_bad_row == "error":
            raise BadRowError(f"{row}{BAD_ROW_REMEDY}")
        if row.index not in self.bad_rows:
            self.bad_rows[row.index] = row
            logger.warning("bad row left out: number=%d %s", len(self.bad_rows), row)


@contextmanager
def _own_sigchld() -> Iterator[None]:
    """Keep the handler of SIGCHLD inside the block.

    That of torch raises wherever the main thread happens to be when a process of the loader dies, in the
    middle of an update for example. Without it the death is found when a row is asked for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _order(num_rows: int, epoch: int, place: int, seed: int | None, read_on: bool) -> Iterator[int]:
    """Numbers of rows from a place of an epoch on; None leaves them in the order of the files."""
    while True:
        order = list(range(num_rows))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(num_rows, generator=generator).tolist()
        yield from order[place:]
        if not read_on:
            return
        epoch, place = epoch + 1, 0


class Loaders(NamedTuple):
    """Both loaders of a run; None where no files are named."""

    train: PromptLoader[RLHFDataset] | None
    val: PromptLoader[RLHFDataset] | None


def make_loaders(
    config: PPOConfig, tokenizer: Any, processor: Any | None, cache: MediaCache | None = None
) -> Loaders:
    """Open the data of a run.

    Args:
        config: The whole config; `data` and the model's path are read.
        tokenizer: Of the model.
        processor: Of the model if it reads media.
        cache: The run's media cache; None keeps decoded media in the process that decoded them.

    Raises:
        ValueError: Data cannot be used, or the training rows do not fill one batch.
    """
    data = config.data
    open_dataset = partial(
        RLHFDataset,
        tokenizer=tokenizer,
        processor=processor,
        config=data,
        reserved=BATCH_KEYS,
        row_timeout_s=data.row_timeout_s,
        report=BadRowReport(Path(config.trainer.checkpoint_folder) / REPORT_NAME),
        **media_arguments(config.worker.actor.model, media_options(config), processor, cache),
    )
    train = val = None
    if data.train_files:
        dataset = open_dataset(data.train_files, option="data.train_files")
        size = config.loader_batch_size
        _check_size(dataset, size, data)
        train = PromptLoader(
            dataset, size, shuffle=data.shuffle, seed=data.seed, drop_last=True, read_on=True,
            num_workers=data.num_workers,
        )  # fmt: skip
    if data.val_files:
        dataset = open_dataset(data.val_files, option="data.val_files")
        size = len(dataset) if data.val_batch_size == -1 else data.val_batch_size
        val = PromptLoader(
            dataset, size, shuffle=False, seed=data.seed, drop_last=False, read_on=False,
            num_workers=data.num_workers,
        )  # fmt: skip
    return Loaders(train, val)


def media_options(config: PPOConfig) -> MediaOptions:
    """How images and videos are read: the same in the loader's processes and in the workers."""
    rollout = config.worker.rollout
    return MediaOptions.from_data(
        config.data, num_video_frames=rollout.num_video_frames, tokens_per_frame=rollout.tokens_per_frame
    )


def media_arguments(
    model: ModelConfig, options: MediaOptions, processor: Any | None, cache: MediaCache | None
) -> dict[str, Any]:
    """What a dataset needs to read media and to place their tokens; nothing for a model of text."""
    if processor is None:
        return {}
    assert model.model_path is not None, "the config was checked"
    model_config = AutoConfig.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
    positions = position_ids_for(model_config.model_type)
    if positions is not None:
        positions = partial(positions, constants=MropeConstants.from_config(model_config))
    return {"media": MediaLoader(processor, options, cache), "position_ids": positions}


def _check_size(dataset: RLHFDataset, batch_size: int, data: Any) -> None:
    if len(dataset) < batch_size:
        name = "rollout_batch_size" if data.mini_rollout_batch_size is None else "mini_rollout_batch_size"
        raise ValueError(
            f"`data.{name}` ({batch_size}) must be at most the number of usable training rows,"
            f" got {len(dataset)}: `data.train_files` has {len(dataset.rows)} rows,"
            f" {dataset.num_overlong} too long, {len(dataset.bad_rows)} bad"
        )


def _as_arrays(tensors: Sequence[str], item: Any) -> Any:
    """Tensors as arrays: each tensor that leaves a worker process would hold a file descriptor."""
    if isinstance(item, BadRow):
        return item
    return item | {name: item[name].numpy() for name in tensors}
