# SPDX-License-Identifier: Apache-2.0
"""A stream that is resumed again and again, beside other work, trains on and never waits."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.runs import Run
from tests.faults.test_workers import OWN, STREAM
from verl.protocol import DataProto
from verl.trainer.rollouts.stream_groups import PROMPTS_FILE

pytestmark = pytest.mark.faults
RESUMES = 30
BUSY_LOOPS = 3
WIDE = ["data.num_workers=1", "trainer.async.staleness_threshold=3", "trainer.save_freq=1"]
BOUNDS = (  # each smaller than in the run that saved
    ["trainer.async.staleness_threshold=0"],
    ["trainer.async.staleness_threshold=1"],
    ["trainer.async.max_inflight_prompts=1"],
    ["data.rollout_batch_size=2"],
    ["data.rollout_batch_size=2", "trainer.async.staleness_threshold=0"],
)


@contextmanager
def other_work() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def num_carried(checkpoint):
    return len(DataProto.load_from_disk(checkpoint / PROMPTS_FILE))


def test_a_stream_trains_on_from_every_checkpoint_and_with_every_smaller_bound(tmp_path, text_arguments):
    with other_work():
        for step in range(1, RESUMES + 2):
            # Every other resume has a smaller bound; the next one carries as many prompts again.
            bounds = [] if step % 2 else BOUNDS[step // 2 % len(BOUNDS)]
            options = [*OWN, STREAM, *WIDE, *bounds, f"trainer.max_steps={step}"]
            run = Run(tmp_path, [*text_arguments, *options])

            assert run.end() == 0, f"{bounds}: {run.stderr}"
            assert [logged.step for logged in run.steps] == [step]
            assert bounds or num_carried(tmp_path / f"global_step_{step}") > 0
