# SPDX-License-Identifier: Apache-2.0
"""Samples to call a reward function with, made from rows, and its check before a run takes a device."""

import itertools
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty
from typing import Any, NamedTuple, TypeVar

from verl.batch_keys import BATCH_KEYS
from verl.config.data import DataConfig
from verl.config.ppo import PPOConfig
from verl.config.worker import WorkerConfig
from verl.data.bad_rows import BadRow, BadRowError
from verl.data.dataset import RowDataset
from verl.data.loader import dataset_class, load_readers, media_options
from verl.data.rl_dataset import RLHFDataset, collate_fn
from verl.protocol import DataProto
from verl.rewards.failures import reason
from verl.rewards.function import split_calls
from verl.rewards.manager import pickle_inputs
from verl.rewards.pool import Batch, Call, RewardPool
from verl.trainer.rollouts.sampler import reward_columns, with_uids
from verl.utils.rank_logger import get_logger

D = TypeVar("D", bound=RowDataset)

MARGIN_S = 3.0  # for the pool to notice that a call took too long, and where
WRONG = "no such answer"  # used if no other row has another ground truth

logger = get_logger(__name__)


class Response(NamedTuple):
    """A response with the inputs of the reward function."""

    name: str  # for the user: its line and row
    number: int  # of the row over all files; of the line if it names no row
    group: Hashable  # equal for responses to the same row
    columns: dict[str, Any]


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
        """Return the columns of the first usable rows, by their numbers."""
        found: dict[int, dict[str, Any]] = {}
        reason = None
        for row in itertools.takewhile(lambda _: len(found) < count, self.dataset.indices):
            try:
                found[row] = self.of(row)
            except BadRowError as error:
                reason = error
        if not found:
            raise BadRowError(f"no row can be used; the last: {reason}")
        return found

    def count_tokens(self, response: str) -> int:
        return len(self.dataset.tokenizer.encode(response, add_special_tokens=False))


def unchecked(dataset: type[D]) -> type[D]:
    """Return the class with rows that are checked only as they are read."""

    def all_rows(self: RowDataset, option: str) -> list[int]:
        return list(range(len(self.rows)))

    made: Any = type(dataset.__name__, (dataset,), {"_usable_rows": all_rows})
    return made


def sample_responses(rows: RowColumns, count: int) -> list[Response]:
    """Make three responses to each of the first usable rows: its ground truth, nothing, a wrong answer."""
    columns = rows.first(count)
    truths = [str(seen["ground_truth"]) for seen in columns.values()]
    responses = []
    for position, (truth, (row, seen)) in enumerate(zip(truths, columns.items(), strict=True)):
        # The wrong answer is the ground truth of the next row that has another one.
        others = [other for other in truths[position:] + truths[:position] if other != truth]
        samples = {"ground truth": truth, "empty": "", "wrong": others[0] if others else WRONG}
        for name, text in samples.items():
            given = {"response": text, "response_length": rows.count_tokens(text)}
            responses.append(Response(f"row {row}, {name}", row, row, seen | given))
    return responses


def check_reward(config: PPOConfig) -> None:
    """Score the samples of the first usable row in a process of its own, and log their scores.

    It takes little longer than `worker.reward.timeout_s`: samples that are not scored by then are left out.

    Raises:
        ValueError: The function cannot be loaded; or it fails for all samples, or for one with
            `worker.reward.on_failure=error`.
    """
    options = config.worker.reward
    if options.reward_function is None:
        return
    pool = RewardPool(options.reward_function, replace(options, num_cpus=1, on_failure="mask"))
    try:
        rows = _open_rows(config.data, config.worker)  # while the process imports the file
        samples = sample_responses(rows, 2)[:3]  # the second row has the wrong answer to the first
        reward_type = pool.wait_until_loaded().reward_type
        parts = split_calls(reward_type, [each.group for each in samples], options.batch_size)
        calls = _score(pool, samples, parts, options.timeout_s)
        if len(calls) == 1 and calls[0].failures and options.on_failure != "error":
            # One sample may have failed the call of all.
            calls = _score(pool, samples, [[index] for index in range(len(samples))], options.timeout_s)
        _report(calls, samples, options.on_failure)  # closing the pool fails the calls that are left
    except BadRowError:
        return  # opening the data lists the rows
    finally:
        pool.close()


def _open_rows(data: DataConfig, worker: WorkerConfig) -> RowColumns:
    media = media_options(data, worker.rollout)
    readers = load_readers(worker.actor.model, data.override_chat_template, media, None)
    option = "train_files" if data.train_files else "val_files"
    dataset = unchecked(dataset_class(data, RLHFDataset))(
        getattr(data, option),
        readers.tokenizer,
        readers.processor,
        data,
        media=readers.media,
        position_ids=readers.position_ids,
        option=f"data.{option}",
        row_timeout_s=data.row_timeout_s,
        reserved=BATCH_KEYS,
    )
    return RowColumns(dataset)


def _score(
    pool: RewardPool, samples: Sequence[Response], parts: list[list[int]], timeout_s: float
) -> list[Call]:
    batch, calls = Batch(), []
    for part in parts:
        inputs = [samples[index].columns for index in part]
        calls.append(Call(part, inputs, pickle_inputs(part, inputs), batch))
    pool.submit(calls)
    end = time.monotonic() + timeout_s + MARGIN_S
    with suppress(Empty):
        for _ in calls:
            batch.finished.get(timeout=max(0.0, end - time.monotonic()))
    return calls


def _report(calls: Sequence[Call], samples: Sequence[Response], on_failure: str) -> None:
    told = []
    for call in calls:
        for position, index in enumerate(call.rows):
            score = "failed" if call.failures else "not scored in time"
            if call.scores is not None:
                score = f"{call.scores[position]['overall']:g}"
            told.append(f"{samples[index].name} {score}")
    scored = [call for call in calls if call.scores is not None]
    failed = [call for call in calls if call.scores is None and call.failures]
    text = f"samples of the reward function: {'; '.join(told)}"
    if failed and (on_failure == "error" or not scored):
        remedy = ", and such a response ends a run with `on_failure=error`" if scored else ""
        raise ValueError(
            f"the reward function failed in {len(failed)} of {len(scored) + len(failed)} calls before the"
            f" run{remedy}. {text}. The first reason:\n\n{reason(failed[0])}"
        )
    logger.info(text)
    if failed:
        logger.warning("a run handles such failures by on_failure=%s: %s", on_failure, reason(failed[0]))
