# SPDX-License-Identifier: Apache-2.0
"""Call the reward function of a run in this process, where `print`, `breakpoint()` and pdb work.

    python3 scripts/reward_check.py config=run.yaml                                # on samples made from rows
    python3 scripts/reward_check.py config=run.yaml --responses mine.jsonl --pdb   # on responses of your own

A line of the file is a JSON object with `response` and either `row`, the number of a row counted from 0 over
all training files (`--val`: validation files), or what the function shall see of it: `ground_truth`, `prompt`
and other columns, as the lines of a run's `reward_failures.jsonl` have them. Without a file each row gets
three samples: its ground truth, an empty response and a wrong one. They are no model's responses: a function
that asks for a form, such as a box around the answer, is right to score the bare ground truth low.

The function is called as a run calls it: `sequential` with each response, `batch` with all responses to a row
or `worker.reward.batch_size` of them, `dataproto` with all. No time limit ends a call here; one that a run
would end is told.

Exit status: 0; 2 where a call failed or the config, the data or the file cannot be used.
"""

import argparse
import bdb
import pdb
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.cli.calls import CheckedCall, check_call, split_calls
from verl.cli.text_charts import table
from verl.config.ppo import PPOConfig
from verl.rewards.function import OPTION, load_reward_function
from verl.trainer.command import at_least, make_parser, run_command
from verl.trainer.run.exit_status import BAD_INPUT, INTERRUPTED

if TYPE_CHECKING:
    from verl.cli.reward_inputs import Response

SAMPLES = "samples made from the rows, no model's responses: ground truth, empty and wrong"
ALIKE = (
    "all samples score alike: they lack a form that the function asks for, or it cannot teach; score"
    " responses of your own with --responses\n"
)
SHOWN = 60  # characters of a response in a line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = make_parser("reward_check", __doc__)
    parser.add_argument("--responses", type=Path, help="JSON lines to score in place of samples")
    parser.add_argument("--rows", type=at_least(1), default=4, help="rows to make samples of (default: 4)")
    parser.add_argument("--val", action="store_true", help="rows of data.val_files, not data.train_files")
    parser.add_argument("--pdb", action="store_true", help="debug the first call that raises where it did")
    try:
        return run_command(parser, arguments, _check)
    except bdb.BdbQuit:  # the user left the debugger
        return INTERRUPTED


def _check(switches: argparse.Namespace, config: PPOConfig) -> int:
    options = config.worker.reward
    if options.reward_function is None:
        raise ValueError(f"`{OPTION}` must be path.py:function: this run is scored by a reward model alone")
    reward = load_reward_function(
        options.reward_function, options.reward_function_kwargs, options.reward_type
    )
    responses = _responses(switches, config)
    origin = SAMPLES if switches.responses is None else str(switches.responses)
    sys.stdout.write(
        f"{reward}, line {reward.line}, {reward.reward_type}\n{len(responses)} responses: {origin}\n"
    )
    calls = []
    groups = [response.group for response in responses]
    for places in split_calls(reward.reward_type, groups, options.batch_size):
        chosen = [responses[place] for place in places]
        call = check_call(reward, [one.columns for one in chosen], [one.number for one in chosen])
        calls.append(call)
        sys.stdout.write(_describe(call, chosen, len(calls), options.timeout_s))
        if call.error is not None and switches.pdb:
            pdb.post_mortem(call.error.__traceback__)
            break
    sys.stdout.write(_summary(calls))
    failed = [call for call in calls if call.reason is not None or call.seconds > options.timeout_s]
    if switches.responses is None and len({one["overall"] for call in calls for one in call.scores}) == 1:
        sys.stdout.write(ALIKE)
    if failed:
        sys.stdout.write(f"{len(failed)} of {len(calls)} calls failed\n")
    return BAD_INPUT if failed else 0


def _responses(switches: argparse.Namespace, config: PPOConfig) -> list["Response"]:
    # Imported here so that a wrong config or reward function is reported before torch loads.
    from verl.cli.data_check_open import opened_data  # noqa: PLC0415
    from verl.cli.reward_inputs import RowColumns, read_responses, sample_responses  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder, opened_data(config, Path(folder), measures=False) as data:
        loader = data.val if switches.val or data.train is None else data.train
        if loader is None:
            raise ValueError("`--val` needs `data.val_files`")
        columns = RowColumns(loader.dataset)
        if switches.responses is not None:
            return read_responses(switches.responses, columns)
        return sample_responses(columns, switches.rows)


def _describe(call: CheckedCall, responses: Sequence["Response"], number: int, timeout_s: float) -> str:
    text = f"\ncall {number}: {len(responses)} responses, {1000 * call.seconds:.1f} ms\n"
    if call.seconds > timeout_s:
        text += f"  failed: a run would have ended it after {timeout_s:g} s (`worker.reward.timeout_s`)\n"
    if call.reason is not None:
        return f"{text}  failed for {'; '.join(one.name for one in responses)}: {call.reason}\n"
    for response, scores in zip(responses, call.scores, strict=True):
        shown = "  ".join(f"{name} {value:g}" for name, value in scores.items())
        text += f"  {response.name}: {shown}  {_excerpt(response.columns['response'])}\n"
    return text


def _excerpt(response: str) -> str:
    text = repr(response)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(response)} characters)"


def _summary(calls: Sequence[CheckedCall]) -> str:
    """The scores of all calls by name, and how long the calls took."""
    scores = [one for call in calls for one in call.scores]
    rows: list[tuple[object, ...]] = [("score", "responses", "mean", "lowest", "highest")]
    for name in dict.fromkeys(name for one in scores for name in one):
        values = [one[name] for one in scores if name in one]
        mean = sum(values) / len(values)
        rows.append((name, len(values), f"{mean:g}", f"{min(values):g}", f"{max(values):g}"))
    times = [1000 * call.seconds for call in calls]
    mean, longest = sum(times) / len(times), max(times)
    return f"\n{table(rows)}  {len(calls)} calls: {mean:.1f} ms in the mean, {longest:.1f} ms the longest\n"
