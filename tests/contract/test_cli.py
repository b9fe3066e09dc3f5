# SPDX-License-Identifier: Apache-2.0
"""The command line as users type it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.architecture.shape import below, modules
from tests.helpers.light_process import run_light
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.config.text import example_yaml
from verl.trainer.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_dry_run_imports_nothing_heavy(tmp_path):
    run_light(f"""
from verl.trainer.main import main
sys.exit(main(["config=examples/config.yaml", "trainer.save_checkpoint_path={tmp_path}/a", "--dry-run"]))
""")

    assert not (tmp_path / "a").exists()


def test_dry_run_prints_the_changed_options_and_the_plan(capsys, tmp_path):
    assert main(["config=examples/config.yaml", "trainer.max_steps=10", "--dry-run"]) == 0

    config_text, plan_text = capsys.readouterr().out.split("\nplan of a training step\n")
    config = yaml.safe_load(config_text)
    assert config["trainer"]["max_steps"] == 10
    assert "critic_warmup" not in config["trainer"]  # at its default
    for name in ("prompts", "sequences", "mini batches", "optimizer steps", "training steps"):
        assert f"  {name} " in plan_text
    assert "10            40 optimizer steps" in plan_text  # 512 prompts / 128 in a mini batch = 4 in a step


@pytest.mark.parametrize("switch", ["--dry-run", "--print-config"])
def test_a_printed_config_runs_as_it_was(switch, capsys, tmp_path):
    arguments = ["config=examples/config.yaml", "worker.rollout.n=4", "trainer.logger=[console]"]
    main([*arguments, switch])
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out.split("\nplan of")[0])

    assert load_config(PPOConfig, [f"config={file}"]) == load_config(PPOConfig, arguments)


def test_a_bad_config_exits_2_with_every_problem_and_no_traceback():
    arguments = ["config=examples/config.yaml", "trainer.nnode=2", "worker.rollout.n=1"]
    command = [sys.executable, "-m", "verl.trainer.main", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "2 problems in the configuration:\n"
        "  - `trainer.nnode` is not an option; did you mean `trainer.nnodes`?\n"
        "  - `worker.rollout.n` must be at least 2 with `algorithm.adv_estimator=grpo`, got 1:"
        " it compares the responses to one prompt\n"
    )


def test_a_dry_run_of_more_processes_than_cores_says_so(capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("verl.planning.device_defaults.shown_backend", lambda: None)
    monkeypatch.setattr("verl.trainer.command.list_gpus", list)
    arguments = ["config=examples/config.yaml", "--dry-run"]

    assert main([*arguments, "trainer.n_gpus_per_node=4"]) == 0
    assert "note: `trainer.n_gpus_per_node` (4) is the number of processes" in capsys.readouterr().err
    assert main([*arguments, "trainer.n_gpus_per_node=6"]) == 2  # no divisor of the batch either
    first, second = re.findall("\n  - (.*?)[,:]", capsys.readouterr().err)[:2]
    assert first.startswith("`trainer.n_gpus_per_node` (6) is the number of processes on CPU")
    assert second.startswith("`data.rollout_batch_size` (512) must be divisible")


@pytest.mark.parametrize("switch", [["--worker.rollout.n=8"], ["--worker.rollout.n", "8"]])
def test_an_option_with_dashes_is_answered_with_the_option(switch, capsys):
    assert main(switch) == 2
    assert "is not a switch: options have no dashes: worker.rollout.n=8\n" in capsys.readouterr().err


def test_the_folder_of_a_config_elsewhere_is_named_with_its_missing_paths(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("data: {train_files: train.jsonl}")
    (tmp_path / "train.jsonl").touch()

    assert main([f"config={tmp_path}/run.yaml"]) == 2
    assert (
        f"paths are relative to the folder that you are in, not to that of the config: cd {tmp_path}\n"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(
    ("options", "is_missing"),
    [
        ("trainer: {load_checkpoint_path: runs/first}", True),
        ("worker: {reward: {reward_function: 'score.py:main'}}", True),
        ("data: {format_prompt: .}", False),
        ("data: {on_bad_row: '`: no f'}", False),
        (None, False),
    ],
)
def test_only_missing_paths_name_the_folder_of_a_config_elsewhere(options, is_missing, tmp_path, capsys):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "score.py").touch()
    if options is not None:
        (tmp_path / "run.yaml").write_text(options)

    assert main([f"config={tmp_path}/run.yaml"]) == 2
    assert (f"not to that of the config: cd {tmp_path}\n" in capsys.readouterr().err) is is_missing


@pytest.mark.parametrize("name", ["train.jsonl", "../elsewhere/train.jsonl", "/nowhere/train.jsonl"])
def test_a_path_that_is_not_next_to_the_config_either_names_no_folder(name, tmp_path, capsys):
    (tmp_path / "run.yaml").touch()

    assert main([f"config={tmp_path}/run.yaml", f"data.train_files={name}"]) == 2
    shown = capsys.readouterr().err
    assert "train.jsonl" in shown and "not to that of the config" not in shown


def test_a_command_that_is_run_as_a_module_is_an_error_not_a_silent_success():
    for name in modules():
        if name.startswith("verl.cli.") and "def main(" in modules()[name].read_text():
            assert "verl.utils.typed_command" in below(name), f"{name} does not import what raises"
    command = [sys.executable, "-m", "verl.cli.merge", "--local_dir", "nowhere"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "error: run the installed command, such as `verl-merge`, instead of its module\n"


def test_a_variable_of_the_shell_and_a_toml_file_are_answered_with_the_form_here(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MY_DATA", "/x")
    (tmp_path / "run.toml").write_text("[data]")

    assert main(["data.train_files=${MY_DATA}/train.jsonl"]) == 2
    assert "write `${oc.env:MY_DATA}` for the environment variable" in capsys.readouterr().err
    assert main([f"config={tmp_path}/run.toml"]) == 2
    assert "run.toml is TOML; a config is YAML: write `[a.b]` as" in capsys.readouterr().err


def test_an_unknown_switch_exits_2(capsys):
    assert main(["--dryrun"]) == 2
    assert "`--dryrun` is not a switch" in capsys.readouterr().err


def test_help_shows_everything_a_section_or_a_name(capsys):
    assert main(["--help"]) == 0
    everything = capsys.readouterr().out
    assert re.match(r"usage: .+ \[config=FILE.yaml\]", everything), "after the command that was typed"
    assert "worker.rollout.n=1" in everything and "trainer.val_freq=-1" in everything

    assert main(["--help", "worker.actor"]) == 0
    section = capsys.readouterr().out
    assert "worker.actor.optim.lr=1.0e-6" in section and "\n  worker.rollout" not in section

    assert main(["--help", "no_such_thing"]) == 2


def test_an_option_without_effect_is_told(capsys):
    main(["config=examples/config.yaml", "worker.actor.padding_free=false", "--dry-run"])

    assert "note: `worker.actor.padding_free` has no effect" in capsys.readouterr().err


def test_the_shipped_config_is_the_generated_one():
    assert (ROOT / "examples" / "config.yaml").read_text() == example_yaml(PPOConfig), "run `make config`"


def test_the_page_of_options_is_the_generated_one(capsys):
    assert main(["--print-options"]) == 0

    assert (ROOT / "docs" / "options.md").read_text() == capsys.readouterr().out, "run `make config`"


def test_unsupported_versions_exit_1_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")

    assert main(["config=examples/config.yaml"]) == 1
    assert "found 3.9.1, needed" in capsys.readouterr().err
