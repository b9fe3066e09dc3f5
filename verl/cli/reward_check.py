# SPDX-License-Identifier: Apache-2.0
"""Call the reward function of a run in this process, where `print`, `breakpoint()` and pdb work.

    verl-reward-check config=run.yaml                                # on samples made from rows
    verl-reward-check config=run.yaml --responses mine.jsonl --pdb   # on your own responses

A line of the file is a JSON object with `response` and either `row`, the number of a row counted from 0 over
all training files (`--val`: validation files), or the function's other inputs: `ground_truth`, `prompt` and
other columns, as in the lines of a run's `reward_failures.jsonl`. In a run with tools a response is one turn
unless the line says otherwise, with `num_turns`, `messages`, `contexts`, `tool_calls` and `tool_rewards`.
Without a file each row gets three samples: its ground truth, an empty response and a wrong one. They do not
come from a model: a function that requires a format, such as a box around the answer, is right to score the
bare ground truth low.

The function is called as in a run: `sequential` with each response, `batch` with all responses to a row
or `worker.reward.batch_size` of them, `dataproto` with all. No time limit ends a call here; a call that a run
would end is reported.

Exit status: 0; 2 if a call failed, or the config, the data or the file cannot be used.
"""

import argparse
import asyncio
import bdb
import pdb
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.ppo import PPOConfig
from verl.rewards.function import (
    OPTION,
    RewardFunction,
    Scores,
    describe,
    describe_error,
    load_reward_function,
    split_calls,
)
from verl.rewards.servers import specs_of
from verl.trainer.command import at_least, make_parser, run_with_config
from verl.trainer.reward_samples import Response, read_responses
from verl.trainer.run.exit_status import BAD_INPUT, INTERRUPTED
from verl.utils.text_table import table

SAMPLES = "samples made from the rows, no model's responses: ground truth, empty and wrong"
ALIKE = (
    "all samples score alike: they lack a format that the function requires, or it cannot teach; score"
    " responses of your own with --responses\n"
)
SHOWN = 60  # characters of a response in a line


class CheckedCall(NamedTuple):
    """One call: its scores, or why it failed."""

    seconds: float
    scores: list[Scores]  # one for each response; none if the call failed
    reason: str | None = None  # of a failure, with the line of the reward file
    error: BaseException | None = None  # raised by the function


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("verl-reward-check", __doc__)
    parser.add_argument("--responses", type=Path, help="JSON lines to score instead of samples")
    parser.add_argument("--rows", type=at_least(1), default=4, help="rows to make samples of (default: 4)")
    parser.add_argument("--val", action="store_true", help="rows of data.val_files, not data.train_files")
    parser.add_argument("--pdb", action="store_true", help="debug the first call that raises where it did")
    try:
        return run_with_config(parser.parse_intermixed_args(arguments), PPOConfig, _check)
    except bdb.BdbQuit:  # the user left the debugger
        return INTERRUPTED


def _check(switches: argparse.Namespace, config: PPOConfig) -> int:
    options = config.worker.scoring
    if options.reward_function is None:
        raise ValueError(f"`{OPTION}` must be path.py:function: this run has no reward function")
    servers = specs_of(config.reward_servers)
    if switches.responses is not None and config.worker.actor.model.is_pipeline:
        raise ValueError("`--responses` holds texts, and the policy of this run makes pictures: omit it")
    if served := [name for name, spec in servers.items() if not spec.is_ready]:
        raise ValueError(
            f"only a run starts `reward_servers.{served[0]}`: give this command an endpoint that is running,"
            f" `reward_servers.{served[0]}.url`, and clear `reward_servers.{served[0]}.model_path`"
        )
    reward = load_reward_function(
        options.reward_function, options.reward_function_kwargs, options.reward_type, servers
    )
    # Imported here so that a wrong config or reward function is reported before torch loads.
    from verl.cli.data_report.opened import opened_data  # noqa: PLC0415
    from verl.trainer.extensions.reward_rows import RowColumns, make_samples  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder, opened_data(config, Path(folder), measures=False) as data:
        loader = data.val if switches.val or data.train is None else data.train
        if loader is None:
            raise ValueError("`--val` needs `data.val_files`")
        rows, path = RowColumns(loader.dataset), switches.responses
        converses = config.worker.rollout.multi_turn.enable
        if path is None:
            responses = make_samples(rows, switches.rows, config.worker)
        else:
            responses = read_responses(path, rows, converses=converses)
    origin = SAMPLES if path is None else str(path)
    title = reward.note or f"{reward}, line {reward.line}, {reward.reward_type}"
    sys.stdout.write(f"{title}\n{len(responses)} responses: {origin}\n")
    calls = _score(reward, responses, options.batch_size, options.timeout_s, debugs=switches.pdb)
    sys.stdout.write(_summary(calls))
    failed = [call for call in calls if call.reason is not None or call.seconds > options.timeout_s]
    if path is None and len({each["overall"] for call in calls for each in call.scores}) == 1:
        sys.stdout.write(ALIKE)
    if failed:
        sys.stdout.write(f"{len(failed)} of {len(calls)} calls failed\n")
    return BAD_INPUT if failed else 0


def _score(
    reward: RewardFunction, responses: Sequence[Response], batch_size: int, timeout_s: float, *, debugs: bool
) -> list[CheckedCall]:
    """Call the function as a run does and show each call; with `debugs` stop at the first error."""
    calls: list[CheckedCall] = []
    for indices in split_calls(reward.reward_type, [each.group for each in responses], batch_size):
        chosen = [responses[index] for index in indices]
        call = check_call(reward, [each.columns for each in chosen], [each.number for each in chosen])
        calls.append(call)
        sys.stdout.write(_describe(call, chosen, len(calls), timeout_s))
        if call.error is not None and debugs:
            pdb.post_mortem(call.error.__traceback__)
            break
    return calls


def check_call(
    reward: RewardFunction, inputs: Sequence[dict[str, Any]], numbers: Sequence[int]
) -> CheckedCall:
    """Call a function once and check its scores; an exception is the reason of a failure.

    `numbers` are the rows of the responses, for errors. A user who leaves the debugger raises `BdbQuit`.
    """
    start = time.perf_counter()
    try:
        returned = asyncio.run(reward.call_async(inputs)) if reward.is_async else reward.call(inputs)
    except bdb.BdbQuit:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's function raises anything)
        reason = f"it raised {describe_error(error, reward.path)}for {describe(numbers, inputs)}"
        return CheckedCall(time.perf_counter() - start, [], reason, error)
    seconds = time.perf_counter() - start
    try:
        return CheckedCall(seconds, reward.check(returned, numbers, inputs))
    except ValueError as error:
        return CheckedCall(seconds, [], str(error))


def _describe(call: CheckedCall, responses: Sequence[Response], number: int, timeout_s: float) -> str:
    text = f"\ncall {number}: {len(responses)} responses, {1000 * call.seconds:.1f} ms\n"
    if call.seconds > timeout_s:
        text += f"  failed: a run would have ended it after {timeout_s:g} s (`worker.reward.timeout_s`)\n"
    if call.reason is not None:
        return f"{text}  failed for {'; '.join(each.name for each in responses)}: {call.reason}\n"
    for response, scores in zip(responses, call.scores, strict=True):
        shown = "  ".join(f"{name} {value:g}" for name, value in scores.items())
        answer = response.columns["response"]
        more = f"... ({len(answer)} characters)" if len(repr(answer)) > SHOWN else ""
        text += f"  {response.name}: {shown}  {answer!r:.{SHOWN}}{more}\n"
    return text


def _summary(calls: Sequence[CheckedCall]) -> str:
    scores = [each for call in calls for each in call.scores]
    rows: list[tuple[object, ...]] = [("score", "responses", "mean", "lowest", "highest")]
    for name in dict.fromkeys(name for each in scores for name in each):
        values = [each[name] for each in scores if name in each]
        mean = sum(values) / len(values)
        rows.append((name, len(values), f"{mean:g}", f"{min(values):g}", f"{max(values):g}"))
    times = [1000 * call.seconds for call in calls]
    mean, longest = sum(times) / len(times), max(times)
    return f"\n{table(rows)}  {len(calls)} calls: {mean:.1f} ms on average, {longest:.1f} ms at most\n"
