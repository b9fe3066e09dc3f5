# SPDX-License-Identifier: Apache-2.0
"""Runs in an environment that gives its own prompts, from the command to the rows kept and a resumed run."""

import json

import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig

from tests.helpers.agent_runs import (
    OPTIONS,
    check_resumed,
    save_model,
    talkative,
    train_two_steps,
    write_dots,
)
from tests.helpers.quickstart import COLORS
from verl.viewer.rollout_store import step_files

pytestmark = pytest.mark.heavy
ROUNDS = 3

# Answers in an order that no two runs share.
ENVIRONMENT = f"""
import random
import time

from PIL import Image

from verl.agents.interface import Observation

COLORS = {COLORS}


class Dots:
    '''Shows dots of random colors, and counts the colors that are named.'''

    def __init__(self, rounds):
        self.rounds, self.round = rounds, 0

    async def reset(self, row):
        self.random = random.Random(row["seed"])
        wait()
        count = self.random.randint(1, 2)  # prompts differ in length
        images = [{{"type": "image", "image": self.dot()}} for _ in range(count)]
        return [
            {{"role": "system", "content": row["uid"]}},
            {{"role": "user", "content": [*images, {{"type": "text", "text": "What colour?"}}]}},
        ]

    def step(self, text, calls):
        wait()
        self.round += 1
        reward = float(text in COLORS)
        return Observation("Next.", [self.dot()], reward=reward, done=self.round == self.rounds)

    def dot(self):
        return Image.new("RGB", (56, 56), COLORS[self.random.choice(list(COLORS))])

    def close(self):
        pass


def wait():
    time.sleep(random.SystemRandom().uniform(0, 0.2))
"""

REWARD = """
REWARD_TYPE = "sequential"


def compute_score(entry):
    first = entry["messages"][0]["content"]
    assert entry["prompt"].count(first) == 1, entry["prompt"]
    return {
        "overall": sum(reward or 0.0 for reward in entry["tool_rewards"]),
        "turns": entry["num_turns"],
        "users": sum(message["role"] == "user" for message in entry["messages"]),
    }
"""


def end_every_turn(model):
    """Have any token end a turn."""
    file = model / "generation_config.json"
    size = AutoConfig.from_pretrained(model).text_config.vocab_size
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": list(range(size))}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    end_every_turn(talkative(save_model(folder / "model", seed=0)))
    write_dots(folder, "train", 12, 1)
    write_dots(folder, "val", 4, 2)
    (folder / "dots.py").write_text(ENVIRONMENT)
    (folder / "count_turns.py").write_text(REWARD)
    return folder


def run(folder, name, *options):
    return train_two_steps(
        folder,
        name,
        *OPTIONS,
        "data.max_response_length=64",
        "worker.rollout.limit_images=4",
        "worker.rollout.multi_turn.tool_kwargs={}",
        f"worker.rollout.multi_turn.environment={folder / 'dots.py'}:Dots",
        f"worker.rollout.multi_turn.environment_kwargs={{rounds: {ROUNDS}}}",
        "worker.rollout.multi_turn.max_assistant_turns=null",
        "worker.rollout.multi_turn.tool_concurrency=4",
        f"worker.reward.reward_function={folder / 'count_turns.py'}:compute_score",
        *options,
    )


@pytest.fixture(scope="module")
def unbroken(folder):
    """The metrics of a run of two steps."""
    return run(folder, "unbroken")


@pytest.mark.slow  # test_environments.py leads them in every suite, test_agent_runs.py trains
def test_prompts_of_the_environment_are_trained_with_their_images(folder, unbroken):
    for step in (1, 2):
        rows = pq.read_table(step_files(folder / "unbroken")[step]).to_pylist()
        metrics, values = unbroken[step], [dict(row["reward_values"]) for row in rows]
        assert len(rows) == 16
        assert metrics["agent/turns_mean"] == metrics["agent/turns_max"] == ROUNDS
        assert max(value["overall"] for value in values) >= 1
        assert metrics["actor/grad_norm"] > 0
        assert metrics["agent/tool_s"] > 0 and metrics["agent/tool_failures"] == 0
        # Over images of prompts and of observations, the engine reads what training reads.
        assert metrics["rollout/log_probs_diff_max"] < 1e-4
        prompts = [row["prompt"] for row in rows]
        assert len(set(prompts)) == 4, "the samples of a prompt begin equally"
        assert {text.count("<|image_pad|>") for text in prompts} == {1, 2}
        for row, value in zip(rows, values, strict=True):
            assert sum(row["is_trained"]) == value["turns"] == ROUNDS  # each turn is one token
            assert value["users"] == ROUNDS  # the last observation is not read


@pytest.mark.slow  # one more run; test_training.py resumes one in every suite
def test_a_resumed_run_makes_the_step_that_it_would_have_made(folder, unbroken):
    checkpoint = folder / "unbroken" / "global_step_1"

    resumed = run(folder, "resumed", f"trainer.load_checkpoint_path={checkpoint}")

    check_resumed(folder, "resumed", resumed, unbroken)
