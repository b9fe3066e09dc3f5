# SPDX-License-Identifier: Apache-2.0
"""A stream that is resumed again and again, beside other work, trains on and never waits."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.runs import Run
from tests.faults.test_workers import OWN, STREAM
from verl.protocol import DataProto
from verl.trainer.rollouts.stream_groups import GROUPS_FILE, PROMPTS_FILE

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
    """Number of prompts and finished responses that wait for a later step."""
    files = [checkpoint / PROMPTS_FILE, checkpoint / GROUPS_FILE]
    return sum(len(DataProto.load_from_disk(file)) for file in files if file.exists())


def test_a_stream_trains_on_from_every_checkpoint_and_with_every_smaller_bound(tmp_path, text_arguments):
    last = 0
    with other_work():
        for index in range(RESUMES + 1):
            # Every other resume has a smaller bound; the next one carries as much again.
            bounds = BOUNDS[index // 2 % len(BOUNDS)] if index % 2 else []
            run = Run(tmp_path, [*text_arguments, *OWN, STREAM, *WIDE, *bounds, "trainer.max_steps=1000"])
            run.wait_for_step(last + 1)
            os.kill(run.pid, signal.SIGINT)

            assert run.end() == 128 + signal.SIGINT, f"{bounds}: {run.stderr}"
            assert run.steps[0].step == last + 1
            last = run.steps[-1].step
            assert bounds or num_carried(tmp_path / f"global_step_{last}") > 0
