# SPDX-License-Identifier: Apache-2.0
"""A run's first look at its rows, templates and reward function, before it allocates a device.

A run, a dry run and `data_check` look with plain text, before torch is imported; a run calls the reward
function again when its tokenizer is there.
"""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty
from types import MappingProxyType

from verl.config.data import DataConfig
from verl.config.reward_servers import RewardServerConfig
from verl.config.sft import SFTDataConfig, SFTWorkerConfig
from verl.config.worker import RewardConfig, WorkerConfig
from verl.data.bad_rows import BadRowError
from verl.data.first_look import check_chat_template, look_at_data
from verl.data.plain_files import Row
from verl.rewards.function import split_calls
from verl.rewards.manager import pickle_inputs, reason
from verl.rewards.pool import Batch, Call, RewardPool
from verl.rewards.servers import Specs, specs_of
from verl.trainer.reward_samples import NUM_SAMPLES, PlainRows, Response, sample_responses
from verl.utils.rank_logger import get_logger

MARGIN_S = 3.0  # for the pool to notice that a call took too long, and where
LOOK_S = 8.0  # to import the file, and to score: what takes longer is left to the check of the run
# Only a tokenizer gives these as they are in a run, or they have another name there.
INEXACT = re.compile(r"prompt|response_length|uid|multi_modal_data|_column|messages|contexts|num_turns|tool_")

Servers = Mapping[str, RewardServerConfig]

logger = get_logger(__name__)


def look_at_prompts(
    data: DataConfig,
    worker: WorkerConfig,
    servers: Servers | None = None,
    *,
    checks_rows: bool = True,
    makes_text: bool = True,
) -> list[str]:
    """Look at the prompts of a run and its reward function; return notes, or raise what would end it.

    Without `checks_rows` only columns and templates are looked at, see `look_at_data`. Without `makes_text`
    the function is loaded and not called: pictures need torch.
    """
    check_chat_template(worker.actor.model, data.override_chat_template)
    look = look_at_data(data, worker.actor.model.tokenizer_path, checks_rows=checks_rows)
    if checks_rows:
        converses = worker.rollout.multi_turn.enable
        rows = look.rows if makes_text else []
        servers_of_run = specs_of(servers or {})
        look.notes.extend(look_at_reward(rows, data, worker.scoring, servers_of_run, converses=converses))
    return look.notes


def look_at_conversations(
    data: SFTDataConfig, worker: SFTWorkerConfig, *, checks_rows: bool = True
) -> list[str]:
    """Look at the conversations of a run; see `look_at_prompts`."""
    check_chat_template(worker.actor.model, data.override_chat_template)
    path = worker.actor.model.tokenizer_path
    return look_at_data(data, path, checks_rows=checks_rows).notes


def look_at_reward(
    rows: Sequence[Row],
    data: DataConfig,
    options: RewardConfig,
    servers: Specs = MappingProxyType({}),
    *,
    converses: bool = False,
) -> list[str]:
    """Load the reward function, score samples of the first rows if that is soon done, and return notes.

    A function that asks a model which the run will serve is only loaded. `check_reward` decides on everything
    that depends on the model.

    Raises:
        ValueError: The function cannot be loaded, or a run could not use what it returns.
    """
    notes: list[str] = []
    if options.reward_function is None:
        return notes
    with closing(_open_pool(options, servers)) as pool, suppress(TimeoutError):
        loaded = pool.wait_until_loaded(LOOK_S)
        notes = [loaded.note] if loaded.note else []
        if not rows or not _are_ready(servers):
            return notes
        # The second row has the wrong answer.
        samples = sample_responses(PlainRows(rows, data), 2, converses=converses)[: _num_samples(data)]
        calls = score_samples(pool, samples, loaded.reward_type, options, LOOK_S)
        source = Path(pool.path).read_text(encoding="utf-8", errors="replace")
        if INEXACT.search(source) is None or all(is_bad_result(call) for call in failed_calls(calls)):
            check_scores(calls, samples, options.on_failure)
    return notes


def check_reward(data: DataConfig, worker: WorkerConfig, served: Servers) -> None:
    """Score the samples of the first usable row as a run does, and log their scores.

    It takes little longer than `worker.reward.timeout_s`: samples that are not scored by then are left out.
    Nothing is scored if the function asks a model that the run has yet to serve.

    Raises:
        ValueError: The function cannot be loaded; or it fails for all samples, or for one with
            `worker.reward.on_failure=error`.
    """
    options, servers = worker.scoring, specs_of(served)
    if options.reward_function is None or not _are_ready(servers):
        return
    # A row that cannot be used is listed with others when the data is opened.
    with closing(_open_pool(options, servers)) as pool, suppress(BadRowError):
        # Imported here because it needs torch; the process imports the file meanwhile.
        from verl.trainer.extensions.reward_rows import make_samples, open_rows  # noqa: PLC0415
        from verl.trainer.extensions.rollouts import check_scores_seen  # noqa: PLC0415

        # The second row has the wrong answer.
        samples = make_samples(open_rows(data, worker), 2, worker)[: _num_samples(data)]
        loaded = pool.wait_until_loaded()
        if loaded.note:
            logger.info("%s", loaded.note)
        calls = score_samples(pool, samples, loaded.reward_type, options, options.timeout_s + MARGIN_S)
        logger.info(check_scores(calls, samples, options.on_failure))
        if failed := failed_calls(calls):
            logger.warning(
                "a run handles such failures by on_failure=%s: %s", options.on_failure, reason(failed[0])
            )
        check_scores_seen(data, {name for call in calls for scores in call.scores or () for name in scores})


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


def _num_samples(data: DataConfig) -> int:
    return NUM_SAMPLES * max(1, len(data.sources))  # of the first row of each source


def _open_pool(options: RewardConfig, servers: Specs) -> RewardPool:
    return RewardPool(replace(options, num_cpus=1, on_failure="mask"), servers)


def _are_ready(servers: Specs) -> bool:
    return all(spec.is_ready for spec in servers.values())
