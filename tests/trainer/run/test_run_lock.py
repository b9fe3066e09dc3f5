# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints belongs to one run at a time; the other run here is a process of its own."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.training import quickstart_arguments
from verl.config.trainer import RunConfig
from verl.trainer import main, sft
from verl.trainer.run.run_lock import FILE, locked_run_folder
from verl.utils.rank_logger import get_logger

HOLD = """
import os, sys, time
from verl.config.trainer import RunConfig
from verl.trainer.run.run_lock import locked_run_folder
with locked_run_folder(RunConfig(save_checkpoint_path=sys.argv[1])):
    {inside}
    print("held", flush=True)
    sys.stdin.readline()
"""
PLAIN = HOLD.format(inside="pass")
FORK = "if os.fork() == 0: time.sleep(600)"
SUPERVISED = """
import sys, time
from verl.config.ppo import PPOConfig, TrainerConfig
from verl.trainer.run.run_lock import locked_run_folder
from verl.trainer.run.stopping import StopRequest
from verl.trainer.run.supervisor import Supervisor

def train_once(config, wait_s):
    with StopRequest().listening():  # as in a step, which it finishes and saves when the command is gone
        print("held", flush=True)
        time.sleep(600)

if __name__ == "__main__":
    config = PPOConfig(trainer=TrainerConfig(save_checkpoint_path=sys.argv[1], max_restarts=1))
    with locked_run_folder(config.trainer):
        Supervisor(config, train_once).run()
"""


@pytest.fixture
def other_run(tmp_path):
    """Start a run in the folder `run`; it has it when this returns."""
    started = []

    def start(code=PLAIN):
        script = tmp_path / "other.py"
        script.write_text(code)
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "run")], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        for member in [member for member in psutil.pids() if _session(member) == process.pid]:
            os.kill(member, signal.SIGKILL)
        process.communicate()


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def run_in(folder):
    return RunConfig(save_checkpoint_path=str(folder))


def assert_refused(folder):
    with pytest.raises(ValueError, match="must be a folder that no other run writes") as caught, \
            locked_run_folder(run_in(folder)):  # fmt: skip
        pytest.fail("two runs hold one folder")
    return str(caught.value)


def test_the_error_names_the_folder_the_other_run_and_the_remedy(other_run, tmp_path):
    other = other_run()

    message = assert_refused(tmp_path / "run")

    assert f"`trainer.save_checkpoint_path` ({tmp_path / 'run'})" in message
    assert f"but pid {other.pid} on {socket.gethostname()} (since 20" in message
    assert "give this one its own name (`trainer.experiment_name=...`)" in message


def test_a_folder_is_free_once_its_run_has_ended(other_run, tmp_path):
    other_run().communicate("end\n")

    with locked_run_folder(run_in(tmp_path / "run")):
        assert_held_elsewhere(tmp_path / "run")


def assert_held_elsewhere(folder):
    """Asked from another process: locks of the own one do not exclude each other."""
    asked = subprocess.run(
        [sys.executable, "-c", PLAIN, str(folder)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert f"pid {os.getpid()} on" in asked.stderr


def test_a_killed_run_leaves_its_folder_free_even_if_processes_that_it_forked_live(other_run, tmp_path):
    other = other_run(HOLD.format(inside=FORK))
    (forked,) = psutil.Process(other.pid).children()

    other.kill()
    other.wait()

    assert forked.is_running()
    with locked_run_folder(run_in(tmp_path / "run")):
        pass


def test_a_folder_is_not_free_while_the_child_of_a_killed_supervisor_trains_on(other_run, tmp_path):
    other = other_run(SUPERVISED)
    children = psutil.Process(other.pid).children()
    (child,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    other.kill()
    other.wait()

    assert f"pid {other.pid} (its controller is pid {child.pid}) on" in assert_refused(tmp_path / "run")
    child.kill()
    deadline = time.monotonic() + 60
    while child.is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    with locked_run_folder(run_in(tmp_path / "run")):
        pass


def test_nothing_is_left_of_a_run_that_wrote_nothing(tmp_path):
    with locked_run_folder(run_in(tmp_path / "project" / "run")):
        assert (tmp_path / "project" / "run" / FILE).is_file()

    assert not list(tmp_path.iterdir())


def test_what_a_run_wrote_stays(tmp_path):
    with locked_run_folder(run_in(tmp_path / "run")):
        (tmp_path / "run" / "log").write_text("step 1")

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_costs_a_warning(code, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(get_logger("verl.trainer.run.run_lock"), "propagate", True)

    with locked_run_folder(run_in(tmp_path / "run")):
        pass

    assert "a second run in its folder would not be noticed" in caplog.text


def test_a_file_that_cannot_be_made_is_reported_with_the_folder(tmp_path):
    (tmp_path / "run" / FILE).mkdir(parents=True)

    with pytest.raises(OSError, match=r"its run\.lock cannot: Is a directory"), \
            locked_run_folder(run_in(tmp_path / "run")):  # fmt: skip
        pass


@pytest.mark.parametrize("command", [main, sft])
def test_both_commands_refuse_the_folder_of_a_run_that_is_alive(command, other_run, tmp_path, capsys):
    other = other_run()
    (tmp_path / "images").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for name in ("train", "val"):
        row = '{"problem": "?", "answer": "!", "prompt": "?", "response": "!"}\n'
        (tmp_path / f"{name}.jsonl").write_text(row)
    run_folder = f"trainer.save_checkpoint_path={tmp_path / 'run'}"
    arguments = {
        main: quickstart_arguments(tmp_path, tmp_path / "model", run_folder),
        sft: [
            f"data.train_files={tmp_path / 'train.jsonl'}",
            f"worker.actor.model.model_path={tmp_path / 'model'}",
            "trainer.val_before_train=false",
            "trainer.logger=[console]",
            run_folder,
        ],
    }

    assert command.main(arguments[command]) == 2

    assert f"but pid {other.pid} on" in capsys.readouterr().err
