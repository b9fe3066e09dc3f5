# SPDX-License-Identifier: Apache-2.0
"""Rows as a run's reward function receives them, and samples of them, before a device is allocated."""

import itertools
from bisect import bisect_left
from typing import Any, TypeVar

from verl.agents.setup import schemas_of
from verl.batch_keys import BATCH_KEYS
from verl.config.data import DataConfig, RowsConfig
from verl.config.worker import WorkerConfig
from verl.data.bad_rows import BadRow, BadRowError
from verl.data.dataset import RowDataset, dataset_class
from verl.data.readers import Readers, count_tokens, load_readers, media_options
from verl.data.rl_dataset import RLHFDataset, collate_fn
from verl.protocol import DataProto
from verl.trainer.reward_samples import Response, sample_responses
from verl.trainer.rollouts.sampler import reward_columns, with_uids

D = TypeVar("D", bound=RowDataset)


class RowColumns:
    """The reward function's inputs for rows as in a run, except the response and its length."""

    def __init__(self, dataset: RLHFDataset) -> None:
        self.dataset = dataset
        self._positions = {row: position for position, row in enumerate(dataset.indices)}
        self._bad = {row.index: row for row in dataset.bad_rows}

    def of(self, row: int) -> dict[str, Any]:
        """Return the columns of a row, given by its number over all files."""
        if not 0 <= row < len(self.dataset.rows):
            raise ValueError(f"row {row} must be one of 0 to {len(self.dataset.rows) - 1}")
        item = self._bad[row] if row in self._bad else self.dataset[self._positions[row]]
        if isinstance(item, BadRow):
            raise BadRowError(f"row {row} is bad: {item}")
        prompts = with_uids(DataProto.from_single_dict(collate_fn([item])), f"row-{row}")
        return reward_columns(prompts)[0]

    def first(self, count: int) -> dict[int, dict[str, Any]]:
        """Return the columns of the first usable rows, of each source of a mixture, by their numbers."""
        found: dict[int, dict[str, Any]] = {}
        reason = None
        indices = self.dataset.indices
        firsts = [bisect_left(indices, rows.start) for rows in self.dataset.rows.by_source().values()]
        order = itertools.chain((indices[first] for first in firsts if first < len(indices)), indices)
        for row in itertools.takewhile(lambda _: len(found) < max(count, len(firsts)), order):
            try:
                found[row] = self.of(row)
            except BadRowError as error:
                reason = error
        if not found:
            raise BadRowError(f"no row can be used; the last: {reason}")
        return found

    def count_tokens(self, response: str) -> int:
        return count_tokens(self.dataset.tokenizer, response)


def open_unchecked(kind: type[D], data: RowsConfig, readers: Readers, **own: Any) -> D:
    """Open the training rows (validation rows if there are none), each checked only as it is read.

    `own` are arguments of this kind of dataset.
    """
    option = "train_files" if data.train_files else "val_files"
    return _unchecked(kind)(
        getattr(data, option),
        readers.tokenizer,
        readers.processor,
        data,
        media=readers.media,
        position_ids=readers.position_ids,
        option=f"data.{option}",
        row_timeout_s=data.row_timeout_s,
        tools=readers.tools,
        **own,
    )


def _unchecked(dataset: type[D]) -> type[D]:
    def all_rows(self: RowDataset, option: str) -> list[int]:
        return list(range(len(self.rows)))

    made: Any = type(dataset.__name__, (dataset,), {"_usable_rows": all_rows})
    return made


def make_samples(rows: RowColumns, count: int, worker: WorkerConfig) -> list[Response]:
    """Make three responses to each of the first usable rows, texts or pictures."""
    if not worker.actor.model.is_pipeline:
        return sample_responses(rows, count, converses=worker.rollout.multi_turn.enable)
    from verl.trainer.kinds.pictures import sample_pictures  # noqa: PLC0415 - of diffusion runs only

    return sample_pictures(rows, count, worker)


def open_rows(data: DataConfig, worker: WorkerConfig) -> RowColumns:
    media = media_options(data, worker.rollout)
    tools = schemas_of(worker.rollout.multi_turn)
    readers = load_readers(worker.actor.model, data.override_chat_template, media, None, tools)
    return RowColumns(open_unchecked(dataset_class(data, RLHFDataset), data, readers, reserved=BATCH_KEYS))
