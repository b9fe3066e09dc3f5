# SPDX-License-Identifier: Apache-2.0
"""A run that a scheduler asks to stop ends where an undisturbed run ends.

`tests/trainer/test_training.py` has a run that loses a worker and Ctrl-C; `tests/faults` has the rest.
"""

import os
import signal

import pytest

from tests.faults.runs import Run
from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, train
from verl.checkpoint.tracker import read_record

pytestmark = pytest.mark.slow  # three runs

STEPS = 4


def arguments_for(folder):
    common = ["trainer.val_before_train=false", "trainer.val_freq=-1", f"trainer.max_steps={STEPS}"]
    return quickstart_arguments(folder, folder / "model", *common)


def test_a_signal_saves_the_current_step_and_the_next_run_resumes(tmp_path):
    arguments = arguments_for(make_folder(tmp_path, val=4))
    undisturbed = train(tmp_path / "undisturbed", *arguments)
    run = Run(tmp_path / "stopped", arguments)

    run.wait_for_step(1)
    os.kill(run.pid, signal.SIGTERM)
    status = run.end()
    done = read_record(tmp_path / "stopped").last_global_step
    resumed = train(tmp_path / "stopped", *arguments)

    assert status == 128 + signal.SIGTERM, run.stderr
    assert f"stopped after step {done}; the same command resumes" in run.stderr
    assert 1 <= done < STEPS
    assert {step: learned(resumed[step]) for step in range(1, STEPS + 1)} == {
        step: learned(undisturbed[step]) for step in range(1, STEPS + 1)
    }
