# SPDX-License-Identifier: Apache-2.0
"""The recipe of Skywork-OR1: its commands, stage by stage, as a shell runs them."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers.training import ROOT
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.rewards.function import load_reward_function
from verl.trainer.main import main

PROGRAMS = """
set() { :; }
python3() { printf '%q ' "$@"; echo; }
verl-eval() { printf '%q ' verl-eval "$@"; echo; }
"""


def commands(name, tmp_path, *arguments, **variables):
    """Return the modules and arguments of the Python programs that a script runs."""
    script = ROOT / "examples" / "skywork_or1" / f"{name}.sh"
    command = ["bash", "-c", PROGRAMS + script.read_text(), str(script), *arguments]
    environment = {"PATH": os.environ["PATH"], "DATA_DIR": str(tmp_path)} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("size", ["7B", "32B"])
@pytest.mark.parametrize("length", ["8192", "16384", "32768"])
def test_each_stage_converts_what_is_missing_and_passes_a_dry_run(
    size, length, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    *conversions, train = commands("train", tmp_path, "trainer.nnodes=4", SIZE=size, LENGTH=length)
    assert [words[:2] for words in conversions] == [
        ["scripts/convert_data.py", f"skywork_or1_{size.lower()}"]
    ] * 2

    for words in conversions:
        Path(words[words.index("--output") + 1]).write_text("")
    assert len(commands("train", tmp_path, SIZE=size)) == 1
    assert train[:2] == ["-m", "verl.trainer.main"] and train[-1] == "trainer.nnodes=4"

    arguments = [*train[2:], *(f"data.sources.{name}.train_files=owner/{name}" for name in ("math", "code"))]
    assert main([*arguments, "--dry-run"]) == 0, capsys.readouterr().err
    config = load_config(PPOConfig, arguments)
    assert config.data.max_response_length == int(length)
    assert {name: source.weight for name, source in config.data.sources.items() if source.train_files} == {
        "math": 4.0,
        "code": 1.0,
    }
    reward = config.worker.reward
    function = load_reward_function(reward.reward_function, reward.reward_function_kwargs)
    inputs = {
        "prompt": "?",
        "response": r"so</think> \boxed{34}",
        "response_length": 9,
        "ground_truth": "34",
    }
    names = ("math", "aime24", "aime25")
    scores = function.score([inputs | {"source": name} for name in names])
    assert [score["overall"] for score in scores] == [1.0] * 3
    assert set(reward.reward_function_kwargs["functions"]) == set(config.data.sources)


def test_the_evaluation_reads_both_benchmarks(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "livecodebench.parquet").write_text("")
    (aime,) = commands("eval", tmp_path)
    first, convert, code = commands(
        "eval", tmp_path, "trainer.n_gpus_per_node=2", LIVECODEBENCH="test6.jsonl"
    )

    assert first == [*aime, "trainer.n_gpus_per_node=2"]
    assert convert[:2] == ["scripts/convert_data.py", "livecodebench"]
    for words, column, samples in ((aime, "source", 32), (code, "sub_category", 4)):
        assert words[0] == "verl-eval"
        options = [word for word in words[1:] if "=" in word]
        config = load_config(
            PPOConfig, [*options, "worker.actor.model.model_path=owner/model", "trainer.val_only=true"]
        )
        assert config.data.max_response_length == 32768 and config.data.val_files
        assert words[words.index("--by") + 1] == column
        assert words[words.index("--samples") + 1] == str(samples)
