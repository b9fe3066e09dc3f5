# SPDX-License-Identifier: Apache-2.0
"""A run scores three samples, of each source of a mixture, before it starts Ray."""

import logging
import re
from contextlib import nullcontext

import pytest
import ray

from tests.helpers.training import QUICKSTART, ROOT
from tests.helpers.warm_runs import cool_down
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.trainer import first_look
from verl.trainer.first_look import check_reward
from verl.trainer.main import main

NOTES_CALLS = """
import pathlib, time
REWARD_TYPE = "{kind}"


def judge(row):
    with pathlib.Path(__file__).with_suffix(".calls").open("a") as file:
        file.write(".")
    {statement}


def compute_score(given):
    return judge(given) if REWARD_TYPE == "sequential" else [judge(row) for row in given]
"""


@pytest.fixture
def reward(run, tmp_path):
    """Arguments of a run whose function calls this statement for each `row`, and the number of its calls."""

    def write(statement, *options, kind="sequential"):
        path = tmp_path / "reward.py"
        path.write_text(NOTES_CALLS.format(statement=statement, kind=kind))
        arguments = [*run, f"worker.reward.reward_function={path}:compute_score", *options]
        return arguments, lambda: len(path.with_suffix(".calls").read_text())

    return write


def check(arguments):
    config = load_config(PPOConfig, arguments)
    check_reward(config.data, config.worker, config.reward_servers)


@pytest.mark.parametrize("kind", ["sequential", "batch"])
def test_the_scores_of_the_samples_are_one_line_of_the_log(reward, caplog, kind):
    score = "return {'overall': len(row['response']) / max(1, len(row['ground_truth']))}"
    arguments, num_calls = reward(score, kind=kind)

    with caplog.at_level(logging.INFO):
        check(arguments)

    (line,) = [line for line in caplog.messages if "samples of the reward function" in line]
    assert line.startswith(
        "samples of the reward function: row 0, ground truth 1; row 0, empty 0; row 0, wrong"
    )
    assert num_calls() == 3


@pytest.mark.parametrize(("score", "is_known"), [("accuracy", True), ("nope", False)])
def test_a_sampler_of_a_score_that_the_function_does_not_return_is_refused(reward, score, is_known):
    sampler = f"data.sampler={ROOT / 'examples/sampler/by_pass_rate.py'}:ByPassRate"
    arguments, _ = reward(
        "return {'overall': 1.0, 'accuracy': 0.0}", sampler, f"data.sampler_kwargs={{score: {score}}}"
    )

    problem = r"`data.sampler` cannot use .*`data.sampler_kwargs.score` \(nope\) .*\['accuracy', 'overall'\]"
    with nullcontext() if is_known else pytest.raises(ValueError, match=problem):
        check(arguments)


@pytest.mark.parametrize(
    ("statement", "on_failure", "reason"),
    [
        ("1 / 0", "error", "raised ZeroDivisionError"),
        pytest.param(
            *("time.sleep(1000)", "mask", r"did not return within .* it is at .*reward.py:9, in judge"),
            marks=pytest.mark.nightly("verl/trainer", "verl/rewards"),
        ),
        ("return 'well'", "score", "must return a dict with `overall`"),
    ],
)
def test_a_function_that_fails_everywhere_ends_the_command_before_ray_starts(
    reward, capsys, monkeypatch, statement, on_failure, reason
):
    cool_down()
    monkeypatch.setattr(first_look, "MARGIN_S", 60.0)
    limits = ["worker.reward.timeout_s=1", f"worker.reward.on_failure={on_failure}"]
    arguments, num_calls = reward(statement, *limits, "worker.reward.max_failure_ratio=1")

    assert main(arguments) == 2

    text = capsys.readouterr().err
    assert re.search(rf"failed in (\d) of \1 calls before the run.*{reason}", text, re.DOTALL), text
    assert not ray.is_initialized() and num_calls() <= 6  # each sample and one retry


FAILS_FOR_EMPTY = "return {'overall': 1 / len(row['response'])}"


@pytest.mark.parametrize("kind", ["sequential", "batch"])
def test_on_failure_decides_on_a_function_that_fails_for_an_empty_response(reward, caplog, kind):
    arguments, _ = reward(FAILS_FOR_EMPTY, kind=kind)

    with pytest.raises(ValueError, match=r"(?s)empty failed.*raised ZeroDivisionError"):
        check(arguments)
    with caplog.at_level(logging.INFO):
        check([*arguments, "worker.reward.on_failure=mask"])

    assert "row 0, ground truth 0.25; row 0, empty failed; row 0, wrong 0.333333" in caplog.text  # blue, red
    assert "a run handles such failures by on_failure=mask: reward function" in caplog.text


@pytest.mark.nightly("verl/trainer")
def test_a_slow_function_delays_the_start_by_its_time_limit_at_most(reward, caplog, monkeypatch):
    monkeypatch.setattr(first_look, "MARGIN_S", 0.3)
    statement = "time.sleep(1000 if row['response'] == '' else 1); return {'overall': 1.0}"
    arguments, _ = reward(statement, "worker.reward.timeout_s=4")  # each may take as long, and all together

    with caplog.at_level(logging.INFO):
        check(arguments)

    assert "row 0, ground truth 1; row 0, empty not scored in time; row 0, wrong not scored" in caplog.text


def test_without_a_usable_row_opening_the_data_gives_the_reason(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "<image>?", "answer": "red"}\n' * 2)

    check([*run, f"data.train_files={path}"])


def test_every_source_of_a_mixture_is_scored_before_a_run(run, folder, tmp_path, caplog):
    sources = [
        f"data.sources.first.train_files={folder / 'train.jsonl'}",
        f"data.sources.second.train_files={folder / 'val.jsonl'}",
    ]
    reward = tmp_path / "reward.py"
    reward.write_text(
        "REWARD_TYPE = 'sequential'\n"
        "def main(row):\n"
        "    return {'overall': {'first': 0.25, 'second': 0.75}[row['source']]}\n"
    )
    arguments = [*run, "data.train_files=", *sources, f"worker.reward.reward_function={reward}"]

    with caplog.at_level(logging.INFO):
        check(arguments)

    assert "row 0, wrong 0.25; row 8, ground truth 0.75" in caplog.text


def test_a_source_without_a_function_ends_a_dry_run(run, folder, tmp_path, capsys):
    by_source = ROOT / "examples" / "reward_function" / "by_source.py"
    own = f"{QUICKSTART / 'reward.py'}:compute_score"
    arguments = [
        *run,
        "data.train_files=",
        f"data.sources.first.train_files={folder / 'train.jsonl'}",
        f"data.sources.second.train_files={folder / 'val.jsonl'}",
        f"worker.reward.reward_function={by_source}:compute_score",
        f"worker.reward.reward_function_kwargs={{functions: {{first: '{own}'}}}}",
    ]

    assert main([*arguments, "--dry-run"]) == 2

    assert "`functions` must have the sources ['second'] of `source`" in capsys.readouterr().err
