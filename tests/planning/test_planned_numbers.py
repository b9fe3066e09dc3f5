# SPDX-License-Identifier: Apache-2.0
"""Numbers that the plan, which needs no torch, has from modules that do."""

from verl.distributed.weights import gathering
from verl.planning import planned_run
from verl.planning.speed import rollout_time
from verl.workers.rollout import processed_media


def test_the_plan_has_the_slices_and_threads_that_a_run_has():
    assert planned_run.SLICE_BYTES == gathering.SLICE_BYTES
    assert rollout_time.IMAGE_THREADS == processed_media.NUM_THREADS
