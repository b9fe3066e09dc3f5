# SPDX-License-Identifier: Apache-2.0
"""The config that a run would have, printed."""

import subprocess
import sys

import yaml

from tests.helpers.training import ROOT
from verl.config.ppo import PPOConfig
from verl.planning.device_defaults import load_run_config
from verl.trainer.main import print_config


def printed(capsys, *arguments):
    assert print_config(arguments) == 0
    return capsys.readouterr().out


def test_the_whole_config_loads_to_the_same_config(run, capsys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(printed(capsys, *run))

    assert load_run_config(PPOConfig, [f"config={file}"]) == load_run_config(PPOConfig, run)


def test_the_changed_options_load_to_the_same_config(run, capsys, tmp_path):
    text = printed(capsys, *run, "--changed")
    file = tmp_path / "config.yaml"
    file.write_text(text)

    assert load_run_config(PPOConfig, [f"config={file}"]) == load_run_config(PPOConfig, run)
    changed = yaml.safe_load(text)
    assert changed["algorithm"] == {"norm_adv_by_std": False, "disable_kl": True}  # as in demo.yaml
    assert "critic" not in changed["worker"]


def test_the_script_exits_2_with_every_problem(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "print_cfg.py", "trainer.nnode=2", "data.seed=-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 2 and done.stdout == ""
    assert "did you mean `trainer.nnodes`?" in done.stderr and "`data.seed` must be at least 0" in done.stderr
