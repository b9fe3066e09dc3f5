# SPDX-License-Identifier: Apache-2.0
"""Whole runs inside a process of the user's, on tiny models in one worker each."""

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
import ray
import yaml

import verl
from tests.helpers.training import ROOT, learned, read_metrics
from verl.single_controller.ray.failure import WorkerError

pytestmark = pytest.mark.heavy

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def state_of_process():
    """State of a process that a call must restore; its modules have been imported."""
    assert verl.train
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return handlers, dict(os.environ), list(logging.getLogger("verl").handlers), ray.is_initialized()


@pytest.fixture(scope="module")
def trained(ray_session, folder, tmp_path_factory):
    """The result of a whole run, and the metrics that its logger wrote."""
    from tests.api.conftest import questions

    config, overrides = questions.__wrapped__(folder, tmp_path_factory.mktemp("trained"))
    before = state_of_process()
    result = verl.train(config, overrides)
    assert state_of_process() == before
    return result, read_metrics(result.folder)


def test_the_result_has_what_the_loggers_and_the_folder_have(trained):
    result, logged = trained

    assert (result.step, result.training_steps) == (2, 2)
    assert learned(result.metrics) == pytest.approx(learned(logged[2]))
    assert result.validation == pytest.approx({key: logged[2][key] for key in result.validation})
    scores = {
        step: values["val/reward_score"] for step, values in logged.items() if "val/reward_score" in values
    }
    assert result.best_validation == pytest.approx(max(scores.values()))
    assert scores[result.best_step] == max(scores.values())
    assert result.checkpoint == result.folder / "global_step_2"
    assert result.best_checkpoint.parent == result.folder and result.best_checkpoint.is_dir()
    assert not (result.folder / "run.lock").exists()


@pytest.mark.nightly("verl/api.py", "verl/trainer")
def test_a_loop_over_the_steps_that_is_left_and_taken_up_again_computes_what_train_does(
    ray_session, questions, trained
):
    config, overrides = questions
    before = state_of_process()

    with verl.build(config, overrides, trainer={"save_freq": -1}) as trainer:
        for step in trainer:
            assert step.batch.batch["advantages"].shape[0] == 16
            break
        assert [signal.getsignal(number) for number in SIGNALS] == before[0]  # the loop is over
        assert "val/reward_score" in trainer.last_validation  # of step 0
        saved = trainer.save()
        assert trainer.save() == saved  # of the same step
    assert state_of_process() == before
    with verl.build(config, overrides) as trainer:  # resumes
        rest = list(trainer)

    assert saved.name == "global_step_1"
    assert [step.number, *(each.number for each in rest)] == [1, 2]
    for each in (step, *rest):
        assert learned(each.metrics) == pytest.approx(learned(trained[1][each.number]))


def test_fine_tuning_trains_step_by_step_too(ray_session, conversations):
    with verl.build(conversations, kind="sft") as trainer:
        losses = [step.metrics["train/loss"] for step in trainer]
    result = verl.api.result_of(trainer)

    assert len(losses) == 2 and losses[1] < losses[0]
    assert result.best_validation == pytest.approx(
        -min(-result.best_validation, result.validation["val/loss"])
    )
    assert result.checkpoint.name == "global_step_2"


def test_a_signal_between_two_steps_saves_the_step_and_then_reaches_the_caller(ray_session, questions):
    config, overrides = questions
    seen = []

    with (
        pytest.raises(KeyboardInterrupt),
        verl.build(config, overrides, trainer={"save_freq": -1}) as trainer,
    ):
        for step in trainer:
            seen.append(step.number)
            os.kill(os.getpid(), signal.SIGINT)
        seen.append("after the loop")

    assert seen == [1, "after the loop"]
    assert trainer.run_state.saved.name == "global_step_1"


def test_an_error_of_the_reward_function_is_raised_with_its_words_and_where_to_resume(
    ray_session, questions, tmp_path
):
    config, overrides = questions
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(inputs):\n    raise KeyError('no such color')\n")
    before = state_of_process()

    with pytest.raises(ValueError, match="no such color") as failed:
        verl.train(config, overrides | {"worker.reward.reward_function": f"{reward}:compute_score"})

    assert state_of_process() == before
    assert not isinstance(failed.value, WorkerError)


@pytest.mark.slow  # one more run
def test_an_error_of_the_caller_ends_the_run_and_stays_what_it_is(ray_session, questions):
    config, overrides = questions

    with pytest.raises(ZeroDivisionError) as failed, verl.build(config, overrides) as trainer:
        for step in trainer:
            step.number / 0

    assert not hasattr(failed.value, "__notes__")
    assert (trainer.run_state.saved).name == "global_step_1"  # was being written


def test_a_run_in_another_thread_leaves_signals_to_the_main_one(ray_session, conversations):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(verl.train(conversations, {"trainer.max_steps": 1}, kind="sft"))
    )
    thread.start()
    thread.join()

    assert [result.step for result in results] == [1]


@pytest.mark.slow  # one more run
def test_a_script_without_a_guard_runs_once_and_no_ray_is_left(questions, tmp_path):
    config, overrides = questions
    sections = tmp_path / "overrides.yaml"
    sections.write_text(yaml.safe_dump(overrides))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, yaml, verl\n"
        "sys.stdout.write('begin\\n')\n"
        f"overrides = yaml.safe_load(open({str(sections)!r}))\n"
        f"result = verl.train({config!r}, overrides, trainer={{'max_steps': 1}})\n"
        "import ray\n"
        "sys.stdout.write(f'end {result.step} {ray.is_initialized()}\\n')\n"
    )

    finished = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"},
    )  # fmt: skip

    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.split() == ["begin", "end", "1", "False"]
