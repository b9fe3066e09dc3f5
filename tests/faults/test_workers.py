# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed, stopped, or raise: nothing is lost except the steps since the last checkpoint."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import SFT_SAVED, SFT_STEPS, STEPS
from tests.faults.runs import SFT, Run, assert_same, saved_tensors, steps_again

pytestmark = pytest.mark.faults
RESTART = "trainer.max_restarts=1"
SITE = Path(__file__).with_name("site")


def kill(pid):
    return lambda: os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("phase", ["sync_weights", "gen", "old", "update_actor", "save_checkpoint"])
def test_a_run_whose_worker_is_killed_restarts(phase, tmp_path, text_arguments, undisturbed, record):
    run = Run(tmp_path, [*text_arguments, RESTART])
    run.come_to(step=4, saved=2)

    pid = run.catch(phase)
    run.harm(kill(pid))

    assert run.end() == 0, run.stderr
    failure = (tmp_path / "failures.log").read_text()
    assert re.search(rf"rank \d of 2 \(pid {pid} on .*\) died in phase `{phase}`", failure), failure
    assert_same(run.steps, undisturbed)
    record(
        f"a worker is killed in `{phase}`",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


def test_a_run_whose_worker_is_killed_amid_writing_restarts(tmp_path, text_arguments, undisturbed, record):
    run = Run(tmp_path, [*text_arguments, RESTART])
    run.come_to(step=4, saved=2)

    run.wait((tmp_path / "global_step_4.tmp" / "actor").is_dir, pause_s=0.001)
    run.harm(kill(run.workers()[0]))
    was_written = (tmp_path / "global_step_4").exists()

    assert run.end() == 0, run.stderr
    assert not was_written
    assert_same(run.steps, undisturbed)
    assert not list(tmp_path.glob("*.tmp"))
    record(
        "a worker is killed while a checkpoint is written in the background",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


def test_a_run_whose_worker_is_stopped_restarts(tmp_path, text_arguments, undisturbed, record):
    run = Run(tmp_path, [*text_arguments, RESTART])
    run.come_to(step=4, saved=2)

    pid = run.catch("update_actor")
    run.harm(lambda: os.kill(pid, signal.SIGSTOP))

    assert run.end() == 0, run.stderr
    assert "are stopped (SIGSTOP)" in (tmp_path / "failures.log").read_text()
    assert_same(run.steps, undisturbed)
    record(
        "a worker is stopped (SIGSTOP)",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


OWN = ["worker.hybrid_engine=false", "trainer.n_gpus_per_node=1", "trainer.n_gpus_for_rollout=1"]
STREAM = "trainer.async.mode=stream"
COLLECTIVE = "worker.rollout.weight_transport=collective"
DELTA = "worker.rollout.weight_transport=delta"
LOSSES = {  # options, and the signal
    f"a rollout engine is killed, `{STREAM}`": ((STREAM,), signal.SIGKILL),
    f"a rollout engine is killed, `{STREAM}`, `collective` weights": ((STREAM, COLLECTIVE), signal.SIGKILL),
    f"a rollout engine is killed, `{STREAM}`, `delta` weights": ((STREAM, DELTA), signal.SIGKILL),
    f"a rollout engine is stopped (SIGSTOP), `{STREAM}`": ((STREAM,), signal.SIGSTOP),
    "a rollout engine is killed, `trainer.async.mode=off`": ((), signal.SIGKILL),
}


@pytest.mark.parametrize("fault", LOSSES)
def test_a_run_whose_only_rollout_engine_is_lost_continues_with_another(
    fault, tmp_path, text_arguments, record
):
    options, number = LOSSES[fault]
    run = Run(tmp_path, [*text_arguments, *OWN, *options])
    run.come_to(step=4, saved=2)

    pid = run.catch("gen")
    run.harm(lambda: os.kill(pid, number))

    assert run.end() == 0, run.stderr
    assert [logged.step for logged in run.steps] == list(range(1, STEPS + 1))
    if STREAM in options:
        counts = ("engine_restarts", "engines", "buffer", "in_flight")
        assert [run.steps[-1].metrics[f"async/{name}"] for name in counts] == [1.0, 1.0, 0.0, 0.0]
        assert all(logged.metrics["async/staleness_max"] <= 1.0 for logged in run.steps)
    if DELTA in options:  # the new engine gets everything
        sent, whole = (
            [logged.metrics[f"async/weights_{name}_gb"] for logged in run.steps] for name in ("sent", "whole")
        )
        is_whole = [part == everything for part, everything in zip(sent, whole, strict=True) if everything]
        assert is_whole[0] and any(is_whole[1:]) and not all(is_whole)
    record(fault, again=0, noticed_s=run.noticed_s("is started again"), went_on_s=run.waited_s())


def test_a_stream_whose_only_worker_that_trains_is_killed_restarts(tmp_path, text_arguments, record):
    run = Run(tmp_path, [*text_arguments, *OWN, STREAM, RESTART])
    run.come_to(step=4, saved=2)

    pid = run.catch("update_actor")
    run.harm(kill(pid))

    assert run.end() == 0, run.stderr
    failure = (tmp_path / "failures.log").read_text()
    assert re.search(rf"rank 0 of 1 \(pid {pid} on .*\) died in phase `update_actor`", failure), failure
    assert {logged.step for logged in run.steps} == set(range(1, STEPS + 1))
    assert all(logged.metrics["async/staleness_max"] <= 1.0 for logged in run.steps)
    assert [run.steps[-1].metrics[f"async/{name}"] for name in ("buffer", "in_flight")] == [0.0, 0.0]
    record(
        f"a worker that trains is killed, `{STREAM}`",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


def test_a_fine_tuning_run_whose_worker_is_killed_ends_with_the_same_weights(
    tmp_path, sft_arguments, sft_undisturbed, sft_undisturbed_folder, record
):
    run = Run(tmp_path, [*sft_arguments, RESTART], module=SFT)
    run.come_to(step=SFT_SAVED + 2, saved=SFT_SAVED)

    pid = run.workers()[0]
    run.harm(kill(pid))

    assert run.end() == 0, run.stderr
    failure = (tmp_path / "failures.log").read_text()
    assert re.search(rf"rank \d of 2 \(pid {pid} on .*\) died in phase", failure), failure
    assert_same(run.steps, sft_undisturbed)
    last = f"global_step_{SFT_STEPS}"
    one, other = saved_tensors(sft_undisturbed_folder / last), saved_tensors(tmp_path / last)
    assert one.keys() == other.keys() and len(one) > 20
    assert all(one[key].equal(other[key]) for key in one)
    record(
        "a worker of a fine-tuning run is killed",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


HARMS = {
    "a worker is killed, no restarts": (signal.SIGKILL, "died in phase `update_actor`"),
    "a worker raises": (signal.SIGUSR2, "ValueError: raised from outside"),
}


@pytest.mark.parametrize("fault", HARMS)
def test_a_run_that_ends_says_why_and_the_same_command_resumes(
    fault, tmp_path, text_arguments, undisturbed, record
):
    number, cause = HARMS[fault]
    options = [] if number == signal.SIGKILL else [RESTART]  # what raises would raise again
    run = Run(tmp_path, [*text_arguments, *options], env={"PYTHONPATH": str(SITE)})
    run.come_to(step=4, saved=2)

    pid = run.catch("update_actor")
    run.harm(lambda: os.kill(pid, number))

    assert run.end() == 1
    assert re.search(rf"the run failed in step 4: rank \d of 2 \(pid {pid} on .*in phase", run.stderr)
    assert cause in run.stderr
    assert "the same command resumes from the last checkpoint" in run.stderr
    next_run = Run(tmp_path, [*text_arguments, *options])
    assert next_run.end() == 0, next_run.stderr
    assert_same([*run.steps, *next_run.steps], undisturbed)
    record(
        fault,
        again=steps_again(run, next_run),
        noticed_s=run.noticed_s("the run failed"), went_on_s=next_run.went_on_s(),
    )  # fmt: skip
