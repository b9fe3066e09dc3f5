# SPDX-License-Identifier: Apache-2.0
"""Runs whose conversations are led by an agent of the plain `openai` client, and the rows that they train."""

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
from verl.viewer.rollout_store import step_files

pytestmark = pytest.mark.heavy

AGENT = """
import base64
import random
import time

from openai import OpenAI

TOOL = {"name": "zoom", "parameters": {"type": "object", "properties": {"box": {"type": "array"}}}}


def run(row, policy, hint):
    client = OpenAI()
    with open(row["images"][0], "rb") as file:
        picture = "data:image/png;base64," + base64.b64encode(file.read()).decode()
    shown = {"type": "image_url", "image_url": {"url": picture}}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": hint}]}]
    rewards = []
    for turn in range(3):
        answer = client.chat.completions.create(
            model="gpt", messages=messages, tools=[{"type": "function", "function": TOOL}], max_tokens=1
        ).choices[0].message
        rewards.append(0.25 * bool(answer.tool_calls))
        time.sleep(random.SystemRandom().uniform(0, 0.2))
        messages.append(answer)
        for call in answer.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": [shown]})
        if not answer.tool_calls:
            messages.append({"role": "user", "content": "Sure?"})
        if turn == 1:
            messages = [messages[0]]  # what it has seen is forgotten
    return {"reward": float(answer.content == row["ground_truth"]), "turn_rewards": rewards}
"""

REWARD = """
REWARD_TYPE = "sequential"


def compute_score(entry):
    rewards = entry["tool_rewards"]
    return {
        "overall": sum(reward or 0 for reward in rewards),
        "turns": entry["num_turns"],
        "calls": len(entry["tool_calls"]),
        "messages": len(entry["messages"]),
    }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    talkative(save_model(folder / "model", seed=0))
    write_dots(folder, "train", 12, 1)
    write_dots(folder, "val", 4, 2)
    (folder / "agent.py").write_text(AGENT)
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(folder, name, *options):
    kept = [
        option for option in OPTIONS if not option.startswith(("worker.rollout.multi_turn", "data.max_resp"))
    ]
    return train_two_steps(
        folder,
        name,
        *kept,
        "data.max_response_length=128",
        "worker.rollout.limit_images=3",
        "worker.rollout.multi_turn.enable=true",
        f"worker.rollout.multi_turn.agent={folder / 'agent.py'}:run",
        "worker.rollout.multi_turn.agent_kwargs={hint: 'What color?'}",
        f"worker.reward.reward_function={folder / 'reward.py'}:compute_score",
        *options,
    )


@pytest.fixture(scope="module")
def unbroken(folder):
    """The metrics of a run of two steps."""
    return run(folder, "unbroken")


@pytest.mark.slow  # test_agent_runs_driver.py leads such agents in every suite
def test_an_agent_of_the_plain_client_is_trained_by_the_command(folder, unbroken):
    for step in (1, 2):
        rows = pq.read_table(step_files(folder / "unbroken")[step]).to_pylist()
        metrics, values = unbroken[step], [dict(row["reward_values"]) for row in rows]
        assert len(rows) == 16
        assert metrics["agent/turns_mean"] == 3 and metrics["agent/tool_failures"] == 0
        assert metrics["agent/tool_calls"] == pytest.approx(np.mean([value["calls"] for value in values]))
        assert metrics["actor/grad_norm"] > 0
        # Whole rows: two contexts, each with its image, and further ones after calls.
        assert metrics["rollout/log_probs_diff_max"] < 1e-4
        for row, value in zip(rows, values, strict=True):
            assert sum(row["is_trained"]) == 3  # each turn is one token
            assert value["turns"] == 3 and value["messages"] == 2
            observed = ~np.array(row["is_trained"])
            assert not np.array(row["rollout_log_probs"])[observed].any()
            assert not np.array(row["advantages"])[observed].any()
    assert sum(value["calls"] for value in values) > 0


@pytest.mark.slow  # one more run; test_training.py resumes one in every suite
def test_a_resumed_run_makes_the_step_that_it_would_have_made(folder, unbroken):
    checkpoint = folder / "unbroken" / "global_step_1"

    resumed = run(folder, "resumed", f"trainer.load_checkpoint_path={checkpoint}")

    check_resumed(folder, "resumed", resumed, unbroken)


@pytest.mark.slow  # two more runs
@pytest.mark.parametrize(
    "mode",
    [
        ["worker.hybrid_engine=false", "trainer.n_gpus_for_rollout=1", "trainer.async.mode=stream"],
        ["trainer.async.mode=partial"],
    ],
    ids=["stream", "partial"],
)
def test_agents_continue_from_step_to_step_and_through_validations(folder, mode):
    options = ["trainer.n_gpus_per_node=1", "trainer.max_steps=4", "trainer.val_freq=1"]
    metrics = run(folder, mode[-1], *options, *mode, "trainer.async.staleness_threshold=3")

    assert set(metrics) == {1, 2, 3, 4}
    assert {values["agent/turns_mean"] for values in metrics.values()} == {3.0}
    assert {values["agent/tool_failures"] for values in metrics.values()} == {0.0}
    assert max(values["async/in_flight"] for values in metrics.values()) > 0.0
    assert all(values["async/staleness_max"] <= 3.0 for values in metrics.values())
    assert all(values["actor/grad_norm"] > 0.0 for values in metrics.values())
