# SPDX-License-Identifier: Apache-2.0
"""The plan next to a virtual rank's memory, operations and collectives: published shapes with six layers."""

from dataclasses import replace

import pytest

from tests.virtual.planned import CASES, planned
from tests.virtual.traffic import exchanged, received
from verl.planning.speed import operations
from verl.planning.speed.workload import pass_work

QUICK = ("7b on 8",)  # the others are slow
NO_STATE_YET = ("gen", "old", "ref")  # of the first step
PLANNED_NAMES = {"sync_weights": "gen"}
TOLERANCE = 0.05
MEASURED = ("aten.mm", "aten.addmm", "aten._grouped_mm")  # products, the last of experts


CASE = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)


@pytest.mark.nightly("verl/planning", "verl/workers")
@CASE
def test_the_plan_is_within_a_twentieth_of_the_tracked_peak_and_counts_what_a_rank_does(cluster, case):
    phases, plan = cluster.measure(case.shape, case.setup(), case.ranks), planned(case)

    ratios = {}
    for name, phase in phases.items():
        if name not in ("init_model", "encode"):  # on the CPU: `load` plans the first rank's
            phase_name = PLANNED_NAMES.get(name, name)
            state = plan.policy.state if phase_name in NO_STATE_YET else 0
            ratios[name] = (plan.peaks[phase_name] - state) / phase.peak
    assert len(ratios) >= 4
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=TOLERANCE)
    _check_work(case, phases, plan)


def _check_work(case, phases, plan):
    shape, setup, model = plan.policy.part, plan.policy.setup, plan.run.models[0]
    copies = max(1, case.ranks // (setup.ranks * setup.layer_ranks))
    ulysses = plan.run.lengths.ranks // plan.run.ring
    for each in model.passes:
        phase, updates = phases[each.phase], 2 if each.is_update else 1
        work = pass_work(plan.run, model, each, plan.lengths, shape)
        work = replace(work, micro_batches=len(phase.micro_reads) // updates)
        moved = operations.collectives(
            shape, setup, work, is_update=each.is_update, copies=copies, ulysses=ulysses
        )
        weights = moved.sharding + moved.expert_sharding + moved.replicas + moved.sums
        assert weights == pytest.approx(received(phase) / updates, rel=0.01, abs=1e4)
        assert moved.experts + moved.heads == pytest.approx(exchanged(phase) / updates, rel=0.01, abs=1e6)
        done = operations.update(shape, setup, work) if each.is_update else operations.forward(shape, work)
        if shape.tower is None:
            counted = sum(phase.flops.get(name, 0) for name in MEASURED) / updates
            assert done.products + done.head == pytest.approx(counted, rel=0.02)
