# SPDX-License-Identifier: Apache-2.0
"""The reward function is tried on samples before torch is imported."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.helpers.training import ROOT
from verl.config.data import DataConfig
from verl.config.worker import RewardConfig
from verl.trainer import first_look
from verl.trainer.first_look import look_at_reward

ROWS = [{"prompt": f"{number} + 1?", "answer": str(number + 1), "level": "easy"} for number in range(3)]


@pytest.fixture
def look(tmp_path):
    """Write this body of `score(inputs)` to a file and look at it."""

    def write(body, head="", **options):
        path = tmp_path / "reward.py"
        path.write_text(f"{head}\ndef score(inputs):\n    {body}\n")
        config = replace(RewardConfig(), reward_function=f"{path}:score", **options)
        look_at_reward(ROWS, DataConfig(), config)

    return write


FINE = "return [{'overall': float(x['response'] == x['ground_truth'])} for x in inputs]"
REFUSED = {
    "texts": ("return ['right' for _ in inputs]", "must return a dict with `overall` .* got str"),
    "not a number": ("return [{'overall': float('nan')} for _ in inputs]", "a finite number, got nan"),
    "too few": ("return []", "must return a list of 3 dicts, one per response, got 0"),
    "raises": ("return inputs[0]['hint']", "raised KeyError: 'hint' at .*reward.py:3, in score"),
    "an import": ("import no_such_package", "raised ModuleNotFoundError"),
    "bad result of the prompt": ("return [x['prompt'] for x in inputs]", "got str"),
}  # fmt: skip


@pytest.mark.parametrize("body, message", REFUSED.values(), ids=REFUSED)
def test_a_function_that_a_run_could_not_use_is_refused(look, body, message):
    with pytest.raises(ValueError, match=f"(?s)before the run.*{message}"):
        look(body)


def test_a_function_gets_the_columns_of_the_row(look):
    look("assert {x['level'] for x in inputs} == {'easy'} and len(inputs) == 3; " + FINE)


LEFT = {
    "fine": FINE,
    "a part of the prompt that a chat template writes": "return inputs[0]['prompt'].split('<|im_start|>')[1]",
    "the number of tokens": "return [1 / 0 if inputs[0]['response_length'] == 1 else {'overall': 0.0}]",
    "slow": "import time; time.sleep(1000)",
}  # fmt: skip


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
def test_what_depends_on_the_model_or_takes_long_is_left_to_the_run(look, body, monkeypatch):
    monkeypatch.setattr(first_look, "LOOK_S", 1.5)
    look(body)


def test_a_file_that_takes_long_to_import_is_left_to_the_run(look, monkeypatch):
    monkeypatch.setattr(first_look, "LOOK_S", 0.5)
    look(FINE, head="import time; time.sleep(60)")


def test_failures_that_a_run_handles_do_not_end_it(look):
    body = "return [{'overall': 1 / len(x['response'])} for x in inputs]"  # one sample is empty
    with pytest.raises(ValueError, match="empty failed"):
        look(body, reward_type="batch")
    look(body, on_failure="mask")


def test_a_function_of_another_library_is_called_and_noted(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def score(solution_str, ground_truth):\n    return solution_str == ground_truth\n")
    config = replace(RewardConfig(), reward_function=f"{path}:score")

    (note,) = look_at_reward(ROWS, DataConfig(), config)

    assert note.startswith(f"{path}:1 `score` has the arguments of a reward function for verl")


def test_another_signature_is_named_with_what_is_wanted(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def score(response, truth):\n    return 1.0\n")
    config = replace(RewardConfig(), reward_function=f"{path}:score")

    with pytest.raises(
        ValueError, match=r"score\(response, truth\).*must take one argument.*score\(reward_input"
    ):
        look_at_reward(ROWS, DataConfig(), config)


def test_without_rows_the_function_is_only_loaded(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("import no_such_package\n")

    with pytest.raises(ValueError, match=r"importing .*reward\.py failed: ModuleNotFoundError"):
        look_at_reward([], DataConfig(), replace(RewardConfig(), reward_function=f"{path}:score"))
    path.write_text("def score(inputs):\n    1 / 0\n")
    look_at_reward([], DataConfig(), replace(RewardConfig(), reward_function=f"{path}:score"))


def test_trying_a_function_imports_nothing_heavy():
    code = (
        "import sys; import verl.trainer.first_look\n"
        "assert not {'torch', 'transformers', 'datasets', 'ray', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_in_a_run_with_tools_a_sample_is_a_conversation_of_one_turn(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def score(inputs):\n    return [{'overall': [1.0]} for _ in inputs]\n")
    config = replace(RewardConfig(), reward_function=f"{path}:score")

    look_at_reward(ROWS, DataConfig(), config, converses=True)
    with pytest.raises(ValueError, match="a response that is not a conversation of turns, got"):
        look_at_reward(ROWS, DataConfig(), config)
