# SPDX-License-Identifier: Apache-2.0
"""The folder that `verl-init` writes: complete, readable, and used by the commands as it is."""

import csv
import importlib.util
import json
import re
import sys

import pytest
import yaml

from tests.helpers.light_process import modules_of, run_light
from verl.cli.init import KINDS, main
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.config.sft import SFTConfig
from verl.planning.device_defaults import load_run_config
from verl.trainer.main import main as train

MEDIA = {
    "image": ("image", b"\x89PNG"),
    "video": ("video", b"ftyp"),
}  # column, and part of a file's beginning


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind with its tiny model."""
    root = tmp_path_factory.mktemp("init")
    for kind in KINDS:
        assert main([str(root / kind), "--kind", kind]) == 0
    return root


def rows_of(path):
    text = path.read_text()
    return (
        list(csv.DictReader(text.splitlines()))
        if path.suffix == ".csv"
        else [json.loads(line) for line in text.splitlines()]
    )


def answer_of(row):
    return row["answer"] if "answer" in row else row["messages"][-1]["content"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_as_many_as_the_readme_says_and_no_answer_is_more_frequent(folders, kind):
    facts = KINDS[kind]
    for name, count in ((facts.train, facts.rows), (facts.val, facts.val_rows)):
        answers = [answer_of(row) for row in rows_of(folders / kind / name)]

        assert len(answers) == count and f"{count} " in (folders / kind / "README.md").read_text()
        assert {answers.count(answer) for answer in set(answers)} == {count // 4}


@pytest.mark.parametrize("kind", MEDIA)
def test_every_media_file_that_a_row_names_is_there_and_no_other(folders, kind):
    column, beginning = MEDIA[kind]
    names = [row[column] for name in ("train.csv", "val.csv") for row in rows_of(folders / kind / name)]
    media = folders / kind / KINDS[kind].media

    assert sorted(names) == sorted(path.name for path in media.iterdir())
    assert all(beginning in (media / name).read_bytes()[:16] for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_is_short_commented_and_loads(folders, kind, monkeypatch):
    monkeypatch.chdir(folders / kind)
    text = (folders / kind / "run.yaml").read_text()

    config = load_run_config(SFTConfig if kind == "sft" else PPOConfig, ["config=run.yaml"])
    assert len(text.splitlines()) <= 45 and max(map(len, text.splitlines())) <= 110
    assert len(re.findall("#", text)) >= 8
    assert config.worker.actor.model.model_path == str(folders / kind / "tiny-model")
    assert config.trainer.project_name == kind


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sft"])
def test_a_dry_run_in_the_folder_plans_its_run(folders, kind, monkeypatch, capsys):
    monkeypatch.chdir(folders / kind)

    assert train(["config=run.yaml", "--dry-run"]) == 0

    printed = capsys.readouterr().out
    assert "plan of a training step" in printed and "memory at its most" in printed


@pytest.mark.parametrize("kind", ["image", "text"])
def test_every_answer_is_one_token_of_the_tiny_model(folders, kind):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders / kind / "tiny-model")

    for row in rows_of(folders / kind / KINDS[kind].val):
        assert len(tokenizer.encode(answer_of(row))) == 1
        assert (
            tokenizer.decode(tokenizer.encode(f"answer: {answer_of(row)}\n")) == f"answer: {answer_of(row)}\n"
        )


def test_the_reward_function_takes_the_answer_as_people_write_it(folders):
    spec = importlib.util.spec_from_file_location("reward", folders / "image" / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    responses = {"red": 1, " Red.\n": 1, "blue": 0, "": 0, "reddish": 0, "red red": 0}
    scores = module.compute_score([{"response": text, "ground_truth": "red"} for text in responses])

    assert [score["overall"] for score in scores] == list(responses.values())


def test_the_same_folder_comes_out_again(folders, tmp_path):
    assert main([str(tmp_path / "image")]) == 0
    first, again = folders / "image", tmp_path / "image"

    files = [path.relative_to(first) for path in sorted(first.rglob("*")) if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]  # the reward function was imported
    assert len(files) > 80
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in files)


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_model_stands_in_the_config_and_none_is_made(kind, tmp_path, monkeypatch):
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    assert main([str(tmp_path / "run"), "--kind", kind, "--model", name]) == 0

    monkeypatch.chdir(tmp_path / "run")
    text = (tmp_path / "run" / "run.yaml").read_text()
    config = load_config(
        SFTConfig if kind == "sft" else PPOConfig, ["config=run.yaml", "trainer.device=cuda"]
    )
    assert config.worker.actor.model.model_path == name
    assert not (tmp_path / "run" / "tiny-model").exists()
    assert "tiny" not in text and "tiny" not in (tmp_path / "run" / "README.md").read_text()
    assert config.worker.actor.optim.lr <= 1e-5


def test_a_model_in_a_folder_is_named_as_seen_from_the_new_folder(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(folders / "text")
    assert main([str(tmp_path / "run"), "--kind", "text", "--model", "tiny-model"]) == 0

    model = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["worker"]["actor"]["model"]
    assert model["model_path"] == str(folders / "text" / "tiny-model")


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")

    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty: name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_of_that_name_is_left_alone(tmp_path, capsys):
    (tmp_path / "run").write_text("mine")

    assert main([str(tmp_path / "run")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_name_that_yaml_would_read_otherwise_stays_a_name(tmp_path, monkeypatch):
    assert main([str(tmp_path / "007"), "--model", "a/b"]) == 0

    monkeypatch.chdir(tmp_path / "007")
    assert load_config(PPOConfig, ["config=run.yaml"]).trainer.project_name == "007"


def test_the_next_commands_are_printed_and_stand_in_the_readme(tmp_path, capsys):
    assert main([str(tmp_path / "run"), "--model", "a/b"]) == 0

    printed = capsys.readouterr().out
    readme = (tmp_path / "run" / "README.md").read_text()
    for command in ("verl-data-check config=run.yaml", "verl-train config=run.yaml", "verl-view checkpoints"):
        assert command in printed and command in readme


def test_the_next_commands_work_from_the_folder_of_the_run_in_the_shell_that_printed_them(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/verl-train").touch()

    assert main([str(tmp_path / "run"), "--model", "a/b"]) == 0

    assert f"  {tmp_path}/bin/verl-train config=run.yaml " in capsys.readouterr().out
    assert f"{tmp_path}/bin" not in (tmp_path / "run" / "README.md").read_text()  # may be read elsewhere


def test_help_answers_before_anything_heavy_is_imported():
    done = run_light("from verl.cli.init import main; main(['--help'])", most_modules=400)

    assert "PIL" not in modules_of(done) and "--kind" in done.stdout
