# SPDX-License-Identifier: Apache-2.0
"""Reward functions that fail, and one that pays too much."""

import math
import time

import pytest

from tests.faults.conftest import REWARD, STEPS
from tests.faults.runs import Run, assert_same, steps_again

pytestmark = pytest.mark.faults
RETRIES = "reward/retries"
# One run, a deed in each of four steps: whatever happens to a call, it is made again.
DEEDS = {2: "raises", 3: "hangs", 4: "crashes", 5: "fills its memory"}


def misbehaving(folder, deeds):
    """Options of a reward function with deeds by step."""
    entries = ", ".join(f"{step}: {deed}" for step, deed in deeds.items())
    return [
        f"worker.reward.reward_function={REWARD}:compute_score",
        f"worker.reward.reward_function_kwargs={{folder: {folder}, deeds: {{{entries}}}}}",
    ]


def happened(path):
    """When a deed was noted, by the clock of runs."""
    return path.stat().st_mtime - time.time() + time.monotonic()


def test_a_call_that_fails_once_is_repeated_and_nothing_is_lost(
    tmp_path, text_arguments, undisturbed, record
):
    limits = ["worker.reward.timeout_s=2", "worker.reward.memory_limit_gb=1"]
    run = Run(tmp_path / "run", [*text_arguments, *misbehaving(tmp_path, DEEDS), *limits])

    assert run.end() == 0, run.stderr
    assert_same(run.steps, undisturbed, but=[RETRIES])
    metrics = {logged.step: logged for logged in run.steps}
    for step, deed in DEEDS.items():
        # Whatever answered before may have filled a process's memory: no call is to blame.
        assert (metrics[step].metrics[RETRIES] > 0) is (deed != "fills its memory")
        done, again = happened(tmp_path / deed), happened(tmp_path / f"{deed} repeated")
        record(
            f"the reward function {deed} once",
            again=0, noticed_s=again - done, went_on_s=metrics[step].moment - done,
        )  # fmt: skip


def test_a_call_that_fails_every_time_ends_the_run_which_resumes_once_that_is_fixed(
    tmp_path, text_arguments, undisturbed, record
):
    arguments = [*text_arguments, *misbehaving(tmp_path, {4: "always raises"})]
    run = Run(tmp_path / "run", arguments)

    assert run.end() == 1
    run.harmed = happened(tmp_path / "always raises")
    assert "the run failed in step 4" in run.stderr
    assert f"{REWARD}" in run.stderr and "ValueError: no such luck" in run.stderr
    assert "the same command resumes from the last checkpoint" in run.stderr
    (tmp_path / "repaired").touch()
    next_run = Run(tmp_path / "run", arguments)
    assert next_run.end() == 0, next_run.stderr
    assert_same([*run.steps, *next_run.steps], undisturbed)
    record(
        "the reward function raises every time",
        again=steps_again(run, next_run),
        noticed_s=run.noticed_s("the run failed"), went_on_s=next_run.went_on_s(),
    )  # fmt: skip


def test_updates_whose_gradient_is_not_finite_are_skipped(tmp_path, text_arguments, undisturbed, record):
    run = Run(tmp_path / "run", [*text_arguments, *misbehaving(tmp_path, {3: "huge"})])

    assert run.end() == 0, run.stderr
    run.harmed = happened(tmp_path / "huge")
    metrics = {logged.step: logged.metrics for logged in run.steps}
    assert_same(
        [logged for logged in run.steps if logged.step < 3], {step: undisturbed[step] for step in (1, 2)}
    )
    skipped = [metrics[step]["actor/skipped_updates"] for step in range(1, STEPS + 1)]
    assert skipped == [0, 0, 2, 0, 0, 0]
    assert metrics[3]["actor/grad_norm"] is None
    assert all(math.isfinite(metrics[step]["actor/grad_norm"]) for step in (4, 5, 6))
    # The updates that were skipped changed nothing: what was sampled is what step 3's weights say.
    assert metrics[4]["rollout/log_probs_diff_max"] < 1e-4
    noticed_s = run.noticed_s("update skipped, the gradient is not finite")
    record("a gradient is not finite", again=0, noticed_s=noticed_s, went_on_s=run.went_on_s())
