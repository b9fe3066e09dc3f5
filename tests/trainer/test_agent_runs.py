# SPDX-License-Identifier: Apache-2.0
"""Runs in which the policy calls a tool, from the command to the kept rows and the resumed run."""

import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.agent_runs import (
    OPTIONS,
    check_resumed,
    save_model,
    talkative,
    train_two_steps,
    write_dots,
)
from tests.helpers.training import QUICKSTART, ROOT
from verl.viewer.rollout_store import step_files

pytestmark = pytest.mark.heavy

# Answers in an order that no two runs share.
TOOL = """
import random
import time

from verl.agents.tools.shipped.zoom import Zoom


class LateZoom(Zoom):
    def __call__(self, images: list, box: list[float], image: int = 1):
        '''Look closer: show a part of an image enlarged.

        Args:
            box: Left, top, right and bottom edge of the part.
            image: Number of the image.
        '''
        time.sleep(random.SystemRandom().uniform(0, 0.3))
        return super().__call__(images, box, image)
"""

REWARD = """
REWARD_TYPE = "sequential"


def compute_score(entry):
    last = entry["messages"][-1]["content"]
    return {
        "overall": sum(map(ord, last)) % 7 / 7,
        "turns": entry["num_turns"],
        "calls": len(entry["tool_calls"]),
        "zooms": sum(call["name"] == "zoom" and "box" in call["arguments"] for call in entry["tool_calls"]),
        "roles": sum(message["role"] == "tool" for message in entry["messages"]),
        "rewards": len(entry["tool_rewards"]),
    }
"""


BY_TURN = """
def compute_score(entries):
    scores = []
    for entry in entries:
        calls = len(entry["tool_calls"])
        rewards = [0.5 * calls + len(entry["response"]) % 3, *[1.0 + calls] * (entry["num_turns"] - 1)]
        scores.append({"overall": rewards, "turns": entry["num_turns"]})
    return scores
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    talkative(save_model(folder / "model", seed=0))
    write_dots(folder, "train", 12, 1)
    write_dots(folder, "val", 4, 2)
    (folder / "late_zoom.py").write_text(TOOL)
    (folder / "count_calls.py").write_text(REWARD)
    (folder / "by_turn.py").write_text(BY_TURN)
    return folder


def run(folder, name, *options):
    return train_two_steps(
        folder,
        name,
        *OPTIONS,
        "data.max_response_length=64",
        f"worker.rollout.multi_turn.tools=[{folder / 'late_zoom.py'}:LateZoom]",
        "worker.rollout.multi_turn.tool_concurrency=4",
        f"worker.reward.reward_function={folder / 'count_calls.py'}:compute_score",
        *options,
    )


@pytest.fixture(scope="module")
def unbroken(folder):
    """The metrics of a run of two steps."""
    return run(folder, "unbroken")


def kept_rows(folder, step):
    return pq.read_table(step_files(folder / "unbroken")[step]).to_pylist()


def check_kept_conversation(row, value, run_folder):
    """Compare the kept turns of a row with what the reward function was given."""
    assert (row["num_turns"], row["num_calls"], row["num_failures"]) == (value["turns"], value["calls"], 0)
    assert len(row["turns"]) == row["num_turns"] and not row["is_masked"]
    [context] = row["contexts"]
    assert [tool["function"]["name"] for tool in json.loads(context["tools"])] == ["zoom"]
    assert len(json.loads(context["messages"])) == 1 + row["num_turns"] + value["roles"]
    for turn in row["turns"]:
        assert row["is_trained"][turn["start"] : turn["stop"]] == [True] * (turn["stop"] - turn["start"])
        for seen in turn["observations"]:
            [medium] = seen["media"]
            [file] = medium["files"]
            assert (run_folder / "rollouts/media" / file).is_file() and 0 <= seen["seconds"] < 30


def test_conversations_are_counted_kept_and_scored(folder, unbroken):
    for step in (1, 2):
        rows, metrics = kept_rows(folder, step), unbroken[step]
        values = [dict(row["reward_values"]) for row in rows]
        assert len(rows) == 16
        turns, calls = [value["turns"] for value in values], [value["calls"] for value in values]
        assert metrics["agent/turns_mean"] == pytest.approx(np.mean(turns)) and max(turns) == 2
        assert metrics["agent/tool_calls"] == pytest.approx(np.mean(calls)) and sum(calls) > 0
        assert metrics["agent/tool_failures"] == 0 and metrics["agent/tool_s"] > 0
        assert 0 < metrics["agent/tool/zoom/calls"] <= sum(calls)
        assert metrics["agent/tool/zoom/failures"] == 0 and metrics["agent/tool/zoom/s"] < 30
        assert metrics["actor/grad_norm"] > 0
        assert metrics["rollout/log_probs_diff_max"] < 1e-4
        for row, value in zip(rows, values, strict=True):
            assert value["zooms"] == value["calls"] and value["rewards"] == value["turns"]
            assert value["roles"] == value["turns"] - 1  # the second turn's call is not made
            # Each turn is one token, and what the tool answered in between is not trained.
            expected = [True] if value["turns"] == 1 else [True, *[False] * (len(row["token_ids"]) - 2), True]
            assert row["is_trained"] == expected
            check_kept_conversation(row, value, folder / "unbroken")
            observed = ~np.array(expected)
            assert not np.array(row["rollout_log_probs"])[observed].any()
            assert not np.array(row["advantages"])[observed].any()
    assert unbroken[2]["val/turns_reward"] >= 1


@pytest.mark.slow  # one more run; test_training.py resumes one in every suite
def test_a_resumed_run_makes_the_step_that_it_would_have_made(folder, unbroken):
    checkpoint = folder / "unbroken" / "global_step_1"

    resumed = run(folder, "resumed", f"trainer.load_checkpoint_path={checkpoint}")

    check_resumed(folder, "resumed", resumed, unbroken)


@pytest.mark.slow  # one more run
def test_each_turn_learns_from_its_own_reward_and_later_ones(folder):
    gamma = 0.5
    metrics = run(
        folder, "by_turn",
        f"worker.reward.reward_function={folder / 'by_turn.py'}:compute_score",
        "algorithm.adv_estimator=turn_grpo",
        f"algorithm.turn_gamma={gamma}",
        "algorithm.norm_adv_by_std=false",
        "trainer.max_steps=1",
        "trainer.debug=true",
    )[1]  # fmt: skip

    rows = pq.read_table(step_files(folder / "by_turn")[1]).to_pylist()
    rewards = []
    for row in rows:
        values = dict(row["reward_values"])
        rewards.append([values[f"overall/turn_{number + 1}"] for number in range(int(values["turns"]))])
        assert row["score"] == pytest.approx(sum(rewards[-1])) == pytest.approx(values["overall"])
        assert [turn["reward"] for turn in row["turns"]] == pytest.approx(rewards[-1])
    assert metrics["reward/overall"] == pytest.approx(np.mean([sum(each) for each in rewards]))
    assert not [name for name in metrics if "turn_" in name and name.startswith(("reward/", "val/"))]
    returns = [np.array([each[0] + gamma * sum(each[1:]), *each[1:]]) for each in rewards]  # 1 or 2 turns
    assert {len(each) for each in returns} == {1, 2}
    for row, own in zip(rows, returns, strict=True):
        for number, turn in enumerate(row["turns"]):
            group = [
                each[number]
                for other, each in zip(rows, returns, strict=True)
                if other["group"] == row["group"] and len(each) > number
            ]
            baseline = np.mean(group) if len(group) > 1 else 0.0
            found = row["advantages"][turn["start"] : turn["stop"]]
            assert found == pytest.approx([own[number] - baseline] * len(found), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_quickstart_with_a_tool_learns_to_call_it(seed, tmp_path):
    command = [
        sys.executable,
        str(QUICKSTART / "agent_demo.py"),
        "--folder",
        str(tmp_path),
        "--seed",
        str(seed),
    ]

    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)

    assert finished.returncode == 0, finished.stderr[-6000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["calls_before"] < 0.5 and found["val_before"] < 0.5
    assert found["calls_after"] > 0.95 and found["val_after"] > 0.9
