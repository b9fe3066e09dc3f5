# SPDX-License-Identifier: Apache-2.0
"""Score samples made from rows with a reward function, before a run. Imports no torch."""

import re
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from verl.config.data import DataConfig
from verl.config.worker import RewardConfig
from verl.data.plain_files import Row
from verl.rewards.failures import reason
from verl.rewards.function import split_calls
from verl.rewards.manager import pickle_inputs
from verl.rewards.pool import Batch, Call, RewardPool
from verl.rewards.servers import Specs

MARGIN_S = 3.0  # for the pool to notice that a call took too long, and where
WRONG = "no such answer"  # used if no other row has another ground truth
LOOK_S = 8.0  # to import the file, and to score: what takes longer is left to the check of the run
# Only a tokenizer gives these as they are in a run, or they have another name there.
INEXACT = re.compile(r"prompt|response_length|uid|multi_modal_data|_column|messages|contexts|num_turns|tool_")


class Response(NamedTuple):
    """A response with the inputs of the reward function."""

    name: str  # for the user: its line and row
    number: int  # of the row over all files; of the line if it names no row
    group: Hashable  # equal for responses to the same row
    columns: dict[str, Any]


class SampledRows(Protocol):
    """Rows as a reward function gets them, without a response."""

    def first(self, count: int) -> dict[int, dict[str, Any]]:
        """Return the columns of the first usable rows, by their numbers."""
        ...

    def count_tokens(self, response: str) -> int: ...


class PlainRows:
    """Inputs of the reward function from rows that no model has read: `prompt` is plain text."""

    def __init__(self, rows: Sequence[Row], data: DataConfig) -> None:
        self._rows, self._data = rows, data

    def first(self, count: int) -> dict[int, dict[str, Any]]:
        return {number: self._columns(number) for number in range(min(count, len(self._rows)))}

    def count_tokens(self, response: str) -> int:
        return len(response.split())

    def _columns(self, number: int) -> dict[str, Any]:
        row, data = self._rows[number], self._data
        others = {name: row[name] for name in row.keys() - {data.image_key, data.video_key, data.audio_key}}
        own = {"ground_truth": row[data.answer_key], "prompt": str(row[data.prompt_key])}
        return others | own | {"uid": f"row-{number}", "multi_modal_data": None}


def sample_responses(rows: SampledRows, count: int, *, converses: bool = False) -> list[Response]:
    """Make three responses to each of the first usable rows: its ground truth, nothing, a wrong answer.

    With `converses` each is a conversation of one turn without calls.
    """
    columns = rows.first(count)
    truths = [str(seen["ground_truth"]) for seen in columns.values()]
    responses = []
    for position, (truth, (row, seen)) in enumerate(zip(truths, columns.items(), strict=True)):
        # The wrong answer is the ground truth of the next row that has another one.
        others = [other for other in truths[position:] + truths[:position] if other != truth]
        samples = {"ground truth": truth, "empty": "", "wrong": others[0] if others else WRONG}
        for name, text in samples.items():
            given = {"response": text, "response_length": rows.count_tokens(text)}
            given |= one_turn(seen["prompt"], text) if converses else {}
            responses.append(Response(f"row {row}, {name}", row, row, seen | given))
    return responses


def one_turn(prompt: str, response: str) -> dict[str, Any]:
    """Return the inputs that a conversation of one turn has in addition, see `conversation_columns`."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    turn = {"num_turns": 1, "tool_calls": [], "tool_rewards": [None]}
    return {"messages": messages, "contexts": [messages]} | turn


def look_at_reward(
    rows: Sequence[Row],
    data: DataConfig,
    options: RewardConfig,
    servers: Specs = MappingProxyType({}),
    *,
    converses: bool = False,
) -> None:
    """Load the reward function and score samples of the first rows, if that is soon done.

    A function that asks a model which the run will serve is only loaded.

    The check of the run, see `check_reward`, decides on all that depends on the model.

    Raises:
        ValueError: The function cannot be loaded, or a run could not use what it returns.
    """
    if options.reward_function is None:
        return
    pool = RewardPool(options.reward_function, replace(options, num_cpus=1, on_failure="mask"), servers)
    try:
        reward_type = pool.wait_until_loaded(LOOK_S).reward_type
        if not rows or not all(spec.is_ready for spec in servers.values()):
            return
        # the second row has the wrong answer
        samples = sample_responses(PlainRows(rows, data), 2, converses=converses)[:3]
        calls = score_samples(pool, samples, reward_type, options, LOOK_S)
        source = Path(pool.path).read_text(encoding="utf-8", errors="replace")
        if INEXACT.search(source) is None or all(is_bad_result(call) for call in failed_calls(calls)):
            check_scores(calls, samples, options.on_failure)
    except TimeoutError:
        return
    finally:
        pool.close()


def score_samples(
    pool: RewardPool, samples: Sequence[Response], reward_type: str, options: RewardConfig, limit_s: float
) -> list[Call]:
    """Call the function as a run does; calls not done after `limit_s` have neither scores nor failures."""
    parts = split_calls(reward_type, [each.group for each in samples], options.batch_size)
    calls = _score(pool, samples, parts, limit_s)
    if len(calls) == 1 and calls[0].failures and options.on_failure != "error":
        # One sample may have failed the call of all.
        calls = _score(pool, samples, [[index] for index in range(len(samples))], limit_s)
    return calls


def _score(
    pool: RewardPool, samples: Sequence[Response], parts: list[list[int]], limit_s: float
) -> list[Call]:
    batch, calls = Batch(), []
    for part in parts:
        inputs = [samples[index].columns for index in part]
        calls.append(Call(part, inputs, pickle_inputs(part, inputs), batch))
    pool.submit(calls)
    end = time.monotonic() + limit_s
    with suppress(Empty):
        for _ in calls:
            batch.finished.get(timeout=max(0.0, end - time.monotonic()))
    return calls


def failed_calls(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.scores is None and call.failures]


def is_bad_result(call: Call) -> bool:
    """Return whether the function returned something other than scores: then it did not raise."""
    return all(" must " in failure.message.partition("\n")[0] for failure in call.failures)


def check_scores(calls: Sequence[Call], samples: Sequence[Response], on_failure: str) -> str:
    """Describe the scores, or raise a ValueError if they show that a run would end."""
    told = []
    for call in calls:
        for position, index in enumerate(call.rows):
            score = "failed" if call.failures else "not scored in time"
            if call.scores is not None:
                score = f"{call.scores[position]['overall']:g}"
            told.append(f"{samples[index].name} {score}")
    scored, failed = [call for call in calls if call.scores is not None], failed_calls(calls)
    text = f"samples of the reward function: {'; '.join(told)}"
    if failed and (on_failure == "error" or not scored):
        remedy = ", and such a response ends a run with `on_failure=error`" if scored else ""
        raise ValueError(
            f"the reward function failed in {len(failed)} of {len(scored) + len(failed)} calls before the"
            f" run{remedy}. {text}. The first reason:\n\n{reason(failed[0])}"
        )
    return text
