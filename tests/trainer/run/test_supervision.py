# SPDX-License-Identifier: Apache-2.0
"""Runs that lose a worker, or are asked to stop, end where an undisturbed run ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import ROOT, learned, quickstart_arguments, read_metrics, train
from verl.checkpoint.tracker import read_record

pytestmark = pytest.mark.heavy

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("supervised"), val=4)


def arguments_for(folder, *options):
    common = [
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_freq=1",
    ]
    return quickstart_arguments(folder, folder / "model", *common, f"trainer.max_steps={STEPS}", *options)


@pytest.fixture(scope="module")
def undisturbed(folder):
    return train(folder / "undisturbed", *arguments_for(folder))


def disturbed(folder, name, step, disturb, *options):
    """Run and call `disturb` with the process once `step` is logged. Returns exit status and stderr."""
    output = folder / name
    command = [sys.executable, "-m", "verl.trainer.main", *arguments_for(folder, *options)]
    process = subprocess.Popen(
        [*command, f"trainer.save_checkpoint_path={output}"], cwd=ROOT, text=True, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: (output / "experiment_log.jsonl").is_file() and step in read_metrics(output), process)
    disturb(process)
    stderr = process.communicate(timeout=300)[1]
    return process.returncode, stderr


def wait_for(condition, process, limit_s=200):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kill_a_worker(process):
    """End the first rank as the kernel does when memory runs out."""
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if is_worker(child)]
    os.kill(ranks[0].pid, signal.SIGKILL)


def is_worker(child):
    try:
        return "FSDPWorker" in " ".join(child.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def assert_as(metrics, expected):
    assert sorted(step for step in metrics if step) == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert learned(metrics[step]) == learned(expected[step])


def test_a_run_whose_worker_is_killed_resumes_from_the_last_checkpoint(folder, undisturbed):
    status, stderr = disturbed(folder, "killed", 2, kill_a_worker, "trainer.max_restarts=1")

    assert status == 0, stderr
    assert "restarting: restart=1 of=1" in stderr
    assert_as(read_metrics(folder / "killed"), undisturbed)
    assert "rank 0 of 2" in (folder / "killed" / "failures.log").read_text()


@pytest.mark.slow  # tests/faults has it too
def test_without_restarts_a_killed_worker_ends_the_run_with_a_hint_to_resume(folder, undisturbed):
    status, stderr = disturbed(folder, "ended", 2, kill_a_worker)

    assert status == 1
    assert "rank 0 of 2" in stderr and "died in phase" in stderr
    assert "the same command resumes from the last checkpoint" in stderr


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_saves_the_current_step_and_the_next_run_resumes(folder, undisturbed, number):
    def send(process):  # Ctrl-C reaches every process of the terminal, a scheduler's SIGTERM the first
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)

    name = f"stopped-{number.name}"
    status, stderr = disturbed(folder, name, 1, send, "trainer.save_freq=-1")
    done = read_record(folder / name).last_global_step

    assert status == 128 + number, stderr
    assert f"stopped after step {done}; the same command resumes" in stderr
    assert 1 <= done < STEPS
    assert_as(train(folder / name, *arguments_for(folder)), undisturbed)
