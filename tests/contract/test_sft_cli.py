# SPDX-License-Identifier: Apache-2.0
"""The command of supervised fine-tuning as users type it."""

import pytest

from tests.architecture.source import ROOT
from tests.helpers.light_process import run_light
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, list_options, load_config
from verl.config.sft import SFTConfig
from verl.config.text import example_yaml
from verl.planning.step_plan import make_sft_plan
from verl.trainer.sft import main

NEEDED = [
    "data.train_files=owner/rows",
    "worker.actor.model.model_path=owner/model",
    "trainer.val_before_train=false",
]
OWN = {  # what reinforcement learning has no use for; the rest has its keys
    "data.messages_key", "data.response_key", "data.train_turns", "data.tools_key", "data.max_length",
    "data.num_video_frames", "data.tokens_per_frame",
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_shipped_config_is_the_generated_one():
    assert (ROOT / "examples" / "sft.yaml").read_text() == example_yaml(SFTConfig), "run `make config`"


def test_the_keys_are_those_of_reinforcement_learning():
    known = {entry.key for entry in list_options(PPOConfig)}

    assert {entry.key for entry in list_options(SFTConfig)} - known == OWN


def test_dry_run_prints_config_and_plan_and_imports_nothing_heavy():
    result = run_light("""
from verl.trainer.sft import main
sys.exit(main(["config=examples/sft.yaml", "trainer.max_steps=10", "--dry-run"]))
""")

    _, text = result.stdout.split("\nplan of a training step\n")
    plan, memory = text.split("\nmemory at its most\n")
    # 64 rows on 8 ranks; 8 micro batches of 1 x 4096 tokens at most
    assert "  rows                      64         8" in plan
    assert "<= 8  1 sequences each, at most 4096 tokens" in plan
    assert plan.rstrip().endswith("training steps            10")
    assert "hf download Qwen/Qwen2.5-7B-Instruct --include '*.json'" in memory


def test_help_and_an_unknown_switch(capsys):
    assert main(["--help", "train_turns"]) == 0
    assert "data.train_turns=all" in capsys.readouterr().out
    assert main(["--dryrun"]) == 2
    assert "`--dryrun` is not a switch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["data.train_turns=first"], "`data.train_turns` must be one of ['all', 'last'], got 'first'"),
        (
            ["worker.actor.global_batch_size=12"],
            "`worker.actor.global_batch_size` (12) must be divisible by the number of data parallel ranks",
        ),
        (["worker.actor.ulysses_size=3"], "must be divisible by `worker.actor.ulysses_size` x"),
        (["trainer.val_freq=2"], "`data.val_files` must be set; without validation set"),
        (["trainer.val_only=true"], "`data.val_files` must be set with `trainer.val_only=true`"),
        (["data.max_prompt_length=4"], "did you mean `data.max_length`?"),
        (["worker.rollout.n=4"], "`worker.rollout.n` is not an option"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(options, problem):
    with pytest.raises(ConfigError) as error:
        load_config(SFTConfig, [*NEEDED, *options])

    assert problem in str(error.value)


def test_steps_are_whole_batches_of_each_epoch():
    config = load_config(SFTConfig, [*NEEDED, "trainer.total_epochs=3"])

    assert make_sft_plan(config, 200).training_steps == 9  # 200 = 3 x 64 + 8
    with pytest.raises(ValueError, match=r"must have at least `worker.actor.global_batch_size` \(64\)"):
        make_sft_plan(config, 63)
