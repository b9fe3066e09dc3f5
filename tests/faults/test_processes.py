# SPDX-License-Identifier: Apache-2.0
"""The other processes of a run: its controller, those that score, those that read."""

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest

from tests.faults.runs import READER, SCORER, SFT, Run, assert_same, descendants, steps_again
from verl.data.media.cache import PREFIX, SHARED_MEMORY

pytestmark = pytest.mark.faults
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def shared_memory_of(pid):
    """Files and folders of the media cache and of torch that bear the number of a process."""
    names = (f"{PREFIX}-*-{pid}-*", f"torch_{pid}_*")
    return [path for name in names for path in SHARED_MEMORY.glob(name)]


def is_of_the_run(process):
    """Whether a living process is more than an agent of Ray: those hold nothing and end after a minute."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()[:1] and process.cmdline()[0].split()[0] not in AGENTS
    return False


def test_a_killed_controller_leaves_nothing_behind_and_the_same_command_resumes(
    tmp_path, text_arguments, undisturbed, record, adopted
):
    before = {child.pid for child in descendants(adopted.pid)}
    run = Run(tmp_path, text_arguments)
    run.come_to(step=4, saved=2)

    run.catch("update_actor")
    run.harm(lambda: os.kill(run.pid, signal.SIGKILL))
    deadline = run.harmed + 10
    while left := [
        child for child in descendants(adopted.pid) if is_of_the_run(child) and child.pid not in before
    ]:
        assert time.monotonic() < deadline, [child.cmdline() for child in left]
        time.sleep(0.02)
    gone_s = time.monotonic() - run.harmed

    assert run.end() == -signal.SIGKILL
    next_run = Run(tmp_path, text_arguments)
    assert next_run.end() == 0, next_run.stderr
    assert_same([*run.steps, *next_run.steps], undisturbed)
    assert shared_memory_of(run.pid) == []
    record(
        "the controller is killed",
        again=steps_again(run, next_run), noticed_s=gone_s, went_on_s=next_run.went_on_s(),
    )  # fmt: skip


def test_a_second_signal_ends_the_run_at_once_and_the_same_command_resumes(
    tmp_path, text_arguments, undisturbed, record
):
    run = Run(tmp_path, text_arguments)
    run.come_to(step=4, saved=2)

    run.catch("update_actor")
    run.process.send_signal(signal.SIGINT)
    run.wait(lambda: "SIGINT: finishing and saving this step" in run.stderr, pause_s=0.001)
    run.harm(lambda: run.process.send_signal(signal.SIGINT))

    assert run.end() == 128 + signal.SIGINT, run.stderr
    ended_s = time.monotonic() - run.harmed
    assert "SIGINT again: stopping at once" in run.stderr
    assert "the same command resumes from the last checkpoint" in run.stderr
    assert max(logged.step for logged in run.steps) == 3
    next_run = Run(tmp_path, text_arguments)
    assert next_run.end() == 0, next_run.stderr
    assert_same([*run.steps, *next_run.steps], undisturbed)
    record(
        "a second Ctrl-C",
        again=steps_again(run, next_run), noticed_s=ended_s, went_on_s=next_run.went_on_s(),
    )  # fmt: skip


def test_a_run_whose_training_process_is_killed_restarts(tmp_path, text_arguments, undisturbed, record):
    run = Run(tmp_path, [*text_arguments, "trainer.max_restarts=1"])
    run.come_to(step=4, saved=2)

    run.catch("update_actor")
    (controller,) = run.processes(
        lambda child: child.ppid() == run.pid and "spawn_main" in str(child.cmdline())
    )
    run.harm(lambda: os.kill(controller, signal.SIGKILL))

    assert run.end() == 0, run.stderr
    assert "the controller process was killed by SIGKILL" in run.stderr
    assert_same(run.steps, undisturbed)
    record(
        "the training process is killed",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


RESTART = {"Ray has started": "raylet/raylet", "workers start": "ray::WorkerProcess"}


@pytest.mark.parametrize("victim", ["supervisor", "both"])
@pytest.mark.parametrize("phase", RESTART)
def test_processes_that_are_killed_during_a_restart_leave_no_workers(
    phase, victim, tmp_path, sft_arguments, adopted
):
    before = {child.pid for child in descendants(adopted.pid)}
    endless = ["trainer.max_restarts=1", "trainer.max_steps=100000"]
    run = Run(tmp_path, [*sft_arguments, *endless], module=SFT)
    run.wait_for_step(2)
    os.kill(run.workers()[0], signal.SIGKILL)
    run.wait(lambda: "restarting" in run.stderr)
    run.wait(lambda: run.processes(lambda child: RESTART[phase] in " ".join(child.cmdline())))

    (child,) = run.processes(lambda one: one.ppid() == run.pid and "spawn_main" in str(one.cmdline()))
    for pid in [run.pid, child] if victim == "both" else [run.pid]:
        os.kill(pid, signal.SIGKILL)

    assert run.end() == -signal.SIGKILL
    deadline = time.monotonic() + 60  # Ray's start is not interrupted
    while left := [one for one in descendants(adopted.pid) if is_of_the_run(one) and one.pid not in before]:
        assert time.monotonic() < deadline, [one.cmdline() for one in left]
        time.sleep(0.02)


def is_scorer(process):
    """Whether it scores: its parent, which guards it, has the same command line."""
    return all(SCORER in " ".join(each.cmdline()) for each in (process, process.parent()))


def is_reader(process):
    """Whether it reads rows: those that it forks, to render templates and open media, have its name."""
    return process.name() == READER != process.parent().name()


FAULTS = {
    "a process of the reward function is killed": (is_scorer, "an idle reward process"),
    "a process that reads rows is killed": (is_reader, "replacing dead processes that read rows"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_whose_helper_process_is_killed_continues(fault, tmp_path, text_arguments, undisturbed, record):
    is_one, notice = FAULTS[fault]
    run = Run(tmp_path, [*text_arguments, "data.num_workers=1"])
    run.come_to(step=4, saved=2)

    run.catch("update_actor")
    (victim,) = run.processes(is_one)
    run.harm(lambda: os.kill(victim, signal.SIGKILL))

    assert run.end() == 0, run.stderr
    assert not psutil.pid_exists(victim)
    assert_same(run.steps, undisturbed)
    assert len(run.steps) == len(undisturbed)
    record(fault, again=0, noticed_s=run.noticed_s(notice), went_on_s=run.went_on_s())
