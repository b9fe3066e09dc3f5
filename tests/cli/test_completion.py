# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from verl.cli.completion import COMMANDS, completion_script


def completed(command, *words):
    """Completions that a shell offers for the last word after the command."""
    quoted = " ".join(f"'{word}'" for word in (command, *words))
    script = f"{completion_script()}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words)}\n"
    script += f'$(complete -p {command} | sed "s/.*-F //; s/ .*//")\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_completes_its_options(command):
    assert "trainer.save_freq=" in completed(command, "trainer.save_f")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer.console", "=", "co"], ["compact"]),  # as bash splits them
        (["trainer.console=co"], ["trainer.console=compact"]),  # as zsh does
        (["trainer.val_only", "="], ["true", "false"]),
        (["--dry"], ["--dry-run"]),
        (["no_such_option"], []),
        (["wo"], ["worker."]),
        (["worker.rollout.val_o"], ["worker.rollout.val_override_config="]),
        (
            ["worker.actor.m"],
            [
                "worker.actor.max_grad_norm=",
                "worker.actor.micro_batch_size_per_device_for_experience=",
                "worker.actor.micro_batch_size_per_device_for_update=",
                "worker.actor.model.",
            ],
        ),
        (["trainer.project_name", "=", "a"], []),  # any text
    ],
)
def test_values_and_switches_are_completed(words, expected):
    assert completed("verl-train", *words) == expected


def test_files_are_completed_for_options_that_name_them(tmp_path, monkeypatch):
    (tmp_path / "run_one.yaml").touch()
    (tmp_path / "run_one.jsonl").touch()
    monkeypatch.chdir(tmp_path)

    assert completed("verl-train", "config", "=", "run") == ["run_one.yaml"]
    assert completed("verl-train", "config=run") == ["config=run_one.yaml"]
    assert completed("verl-train", "data.train_files=run_one.j") == ["data.train_files=run_one.jsonl"]


def test_fine_tuning_completes_its_own_options():
    assert completed("verl-sft", "worker.rollout.") == []
    assert "data.max_length=" in completed("verl-sft", "data.max_l")


@pytest.fixture
def commands_on_the_path(monkeypatch):
    """The commands of this checkout, whichever is installed."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize(
    ("command", "word", "expected"),
    [
        ("verl-merge", "--local", ["--local_dir"]),
        ("verl-view", "--po", ["--port"]),
        ("verl-chat", "--top", ["--top-k", "--top-p"]),
        ("verl-init", "--k", ["--kind"]),
        ("verl-eval", "--correct", ["--correct-at", "--correct-key"]),  # it reads a config, too
    ],
)
def test_the_switches_of_every_command_are_those_of_its_help(command, word, expected, commands_on_the_path):
    assert completed(command, word) == expected


@pytest.mark.parametrize("words", [["global"], ["--local_dir", "global"]])
def test_folders_are_completed_for_the_commands_that_read_them(words, tmp_path, monkeypatch):
    (tmp_path / "global_step_4").mkdir()
    monkeypatch.chdir(tmp_path)

    for command in ("verl-merge", "verl-view", "verl-chat"):
        assert completed(command, *words) == ["global_step_4"]
