# SPDX-License-Identifier: Apache-2.0
"""The reward for programs, through the reward processes of a run."""

import json
import runpy
from pathlib import Path

import pytest

from tests.helpers.growth import grows_with_length
from verl.config.worker import RewardConfig
from verl.rewards.function import load_reward_function
from verl.rewards.manager import RewardManager
from verl.sandbox.outcome import Isolation
from verl.sandbox.runner import detect

FILE = Path(__file__).parents[2] / "examples" / "reward_function" / "code.py"
TESTS = json.dumps({"inputs": ["1 2", "3 4", "5 6", "7 8"], "outputs": ["3", "7", "11", "15"]})
RIGHT = "print(sum(map(int, input().split())))"
HALF = "a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)"
SHARES = ("passed", "wrong", "crashed", "timed_out", "not_run")

pytestmark = pytest.mark.skipif(detect()[0] is Isolation.NONE, reason="this machine has no isolation")


def answer(program):
    return f"<think>```python\nprint(0)\n```</think>Here it is:\n```python\n{program}\n```\nDone."


def score(response, **kwargs):
    reward = load_reward_function(f"{FILE}:compute_score", kwargs)
    return reward.score([{"response": response, "ground_truth": TESTS}])[0]


@pytest.mark.parametrize(
    ("response", "overall", "formatted", "shares"),
    [
        (answer(RIGHT), 1, 1, (1, 0, 0, 0, 0)),
        (answer(HALF), 0, 1, (0.5, 0.25, 0, 0, 0.25)),  # stops at the first failure
        (answer("print(1 / 0)"), 0, 1, (0, 0, 0.25, 0, 0.75)),
        (f"```python\n{RIGHT}\n```", 1, 1, (1, 0, 0, 0, 0)),
        (f"```python\nprint(0)\n```\nor\n```python\n{RIGHT}\n```", 1, 1, (1, 0, 0, 0, 0)),  # the last one
        (RIGHT, 0, 0, (0, 0, 0, 0, 1)),
        (f"<think>\n```python\n{RIGHT}\n```\n</think> no program", 0, 0, (0, 0, 0, 0, 1)),
        ("", 0, 0, (0, 0, 0, 0, 1)),
        ("\x00```python\n\ufffd\n```", 0, 1, (0, 0, 0.25, 0, 0.75)),
    ],
)
def test_code_is_right_when_every_test_passes(response, overall, formatted, shares):
    scores = score(response)

    assert scores["overall"] == scores["accuracy"] == overall
    assert scores["format"] == formatted
    assert tuple(scores[name] for name in SHARES) == shares


@pytest.mark.parametrize("part", ["```python", "```python\n", "```python\n```", "```python```\n"])
def test_the_last_program_is_found_in_time_proportional_to_the_response(part):
    last_program = runpy.run_path(str(FILE))["last_program"]

    assert grows_with_length(last_program, lambda size: part * size, 12_500)


def test_a_partial_reward_is_a_power_of_the_share_that_passed():
    assert score(answer(HALF), partial=True)["overall"] == 0.5
    assert score(answer(HALF), partial=True, power=4)["overall"] == 0.0625
    assert score(answer(RIGHT), partial=True, power=4)["overall"] == 1


def test_reward_processes_score_programs_hostile_ones_among_them():
    config = RewardConfig(
        reward_function=f"{FILE}:compute_score", reward_function_kwargs={"cpu_s": 1}, num_cpus=2
    )
    flood = "import os\nwhile True: os.write(1, b'10 ' * 9999)"
    programs = [RIGHT, "while True: pass", "import os\nos.kill(os.getppid(), 9)\nos.fork()", HALF, flood]

    with RewardManager(config) as manager:
        job = manager.start()
        job.submit(range(5), [{"response": answer(code), "ground_truth": TESTS} for code in programs])
        scores = job.result()

    assert scores["overall"] == [1, 0, 0, 0, 0]
    assert scores["timed_out"] == [0, 0.25, 0, 0, 0]
    assert scores["crashed"] == [0, 0, 0.25, 0, 0.25]
