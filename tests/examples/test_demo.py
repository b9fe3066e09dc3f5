# SPDX-License-Identifier: Apache-2.0
"""The demos' folders, and how a demo ends if its trainer trains nothing."""

import sys

import pytest

from tests.helpers.training import QUICKSTART
from verl.logger.base import Run
from verl.logger.file import FileLogger
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
import demo
import runs
from sums import write_model


def test_a_real_model_replaces_the_one_of_another_demo_in_the_same_folder(tmp_path, monkeypatch):
    demo.KINDS["text"].prepare(tmp_path, 0)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    converted = []
    monkeypatch.setattr("sums.PACKAGE", "pytest")  # the model's own is not among the tests' packages
    monkeypatch.setattr("sums.run_command", lambda command: converted.append(command[-1]))

    demo.DEMOS["critic"].prepare(tmp_path, 0)

    assert converted == [str(tmp_path / "model")] and not (tmp_path / "model").exists()


def test_a_tiny_model_leaves_no_file_of_one_of_another_kind(tmp_path):
    for name in ("image", "text"):
        demo.KINDS[name].prepare(tmp_path / "both", 0)
    demo.KINDS["text"].prepare(tmp_path / "text", 0)

    both, text = ({path.name for path in (tmp_path / name / "model").iterdir()} for name in ("both", "text"))
    assert both == text


def test_a_model_that_no_demo_wrote_stays(tmp_path):
    save_tiny_model(tmp_path / "model", "qwen2")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    for _ in range(2):
        write_model(runs.model_folder(tmp_path, "SmolLM2"))

    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_the_outcome_of_a_run_has_no_steps_of_an_earlier_one_in_its_folder(tmp_path):
    for last in (3, 1):
        logger = FileLogger(Run("p", "e", tmp_path))
        for step in range(last + 1):
            logger.log({demo.ACCURACY: step / 4}, step)

    found = demo.outcome(tmp_path, 0.0)

    assert found["curve"] == {0: 0.0, 1: 0.25} and found["checkpoint"] == str(tmp_path / "global_step_1")


@pytest.mark.parametrize("code", [2, 3])
def test_a_command_that_fails_ends_the_script_with_its_status_and_message(capfd, code):
    with pytest.raises(SystemExit) as ended:
        runs.run_command(
            [sys.executable, "-c", f"import sys; print('why', file=sys.stderr); sys.exit({code})"]
        )

    assert ended.value.code == code and capfd.readouterr().err == "why\n"


def test_a_wrong_switch_is_the_trainer_s_message_and_nothing_after_it(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        demo.train(tmp_path, "text", 0, ["--nope"])

    assert ended.value.code == 2 and capfd.readouterr().err.startswith("`--nope` is not a switch")


def test_a_switch_of_the_trainer_ends_the_script_with_success_and_nothing_else_does():
    done = [sys.executable, "-c", ""]

    runs.run_command(done, ["trainer.max_steps=1"])
    with pytest.raises(SystemExit) as ended:
        runs.run_command(done, ["trainer.max_steps=1", "--dry-run"])

    assert ended.value.code == 0


@pytest.mark.parametrize("inside", [False, True])
def test_a_folder_that_cannot_be_one_is_a_line(tmp_path, inside):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "demo" if inside else tmp_path / "file"

    with pytest.raises(SystemExit, match=r"^error: `--folder` must be a folder .*file is a file$"):
        runs.output_folder(folder, "text")
