# SPDX-License-Identifier: Apache-2.0
"""The supervisor restarts functions that train nothing."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from safetensors.torch import save_file

from tests.helpers.attempts import (
    DONE,
    LOST,
    WAIT_S,
    WRONG,
    be_killed_once,
    be_wrong,
    lose_a_worker_once,
    lose_every_worker,
    start_for_ever,
    train_until_stopped,
    waits_of,
)
from tests.helpers.fine_tuning import arguments_for
from tests.helpers.training import ROOT
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.trainer import sft
from verl.trainer.command import train_once
from verl.trainer.run.exit_status import REPORT
from verl.trainer.run.supervisor import Supervisor


def config_of(kind, folder):
    """Of a run with two restarts."""
    options = {"max_restarts": 2, "restart_wait_s": WAIT_S, "save_checkpoint_path": str(folder)}
    return replace(kind(), trainer=replace(kind().trainer, **options))


@pytest.mark.parametrize(
    ("kind", "train_once", "exit_status", "waits"),
    [
        (PPOConfig, lose_a_worker_once, DONE, ["None", f"{WAIT_S}"]),
        (SFTConfig, be_killed_once, DONE, ["None", f"{WAIT_S}"]),
        (SFTConfig, lose_every_worker, LOST, ["None", f"{WAIT_S}", f"{WAIT_S}"]),
        (SFTConfig, be_wrong, WRONG, ["None"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_retryable_failure_is_restarted_as_often_as_the_options_allow(
    kind, train_once, exit_status, waits, tmp_path
):
    config = config_of(kind, tmp_path)
    supervisor = Supervisor(config, train_once)

    assert supervisor.run() == exit_status
    assert waits_of(config) == waits
    assert supervisor.restarts == len(waits) - 1
    assert (tmp_path / REPORT).exists() == (train_once is be_killed_once)


def test_the_fine_tuning_command_is_supervised_if_restarts_are_allowed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Supervisor, "run", lambda self: seen.append(self.train_once) or DONE)
    for name in ("sft_train.jsonl", "sft_val.jsonl"):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        (tmp_path / name).write_text(json.dumps({"messages": messages}) + "\n")
    for name in ("model", "images"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save_file({}, tmp_path / "model" / "model.safetensors")
    arguments = arguments_for(tmp_path, f"trainer.save_checkpoint_path={tmp_path / 'run'}")

    assert sft.main([*arguments, "trainer.max_restarts=1"]) == 0
    assert seen == [train_once]


def test_a_child_process_can_import_what_the_supervisor_runs():
    assert not train_once.__module__.endswith("__main__")  # spawn does not import a package's `__main__`


@pytest.mark.parametrize(("deed", "mark"), [(start_for_ever, "starting"), (train_until_stopped, "training")])
def test_a_killed_supervisor_ends_what_it_started_and_only_a_step_is_saved(deed, mark, tmp_path):
    code = f"from tests.helpers.attempts import supervise; supervise({deed.__name__!r}, {str(tmp_path)!r})"
    supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / mark).is_file() and (tmp_path / mark).read_text())
    child = psutil.Process(int((tmp_path / mark).read_text()))

    supervisor.kill()
    supervisor.wait()

    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    saved = tmp_path / "saved"
    assert (saved.read_text() if saved.exists() else None) == (None if mark == "starting" else "SIGTERM")


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
