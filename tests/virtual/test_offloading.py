# SPDX-License-Identifier: Apache-2.0
"""Offloading on a virtual GPU: what rests there, and what is copied between it and the host in each phase."""

import pytest

from tests.virtual.measure import PhaseReport
from tests.virtual.shapes import Setup

pytestmark = pytest.mark.heavy

RANKS = 3  # some weights of the shape do not divide evenly
MODULE = "verl/distributed/offload.py:HostMemory"


def loaded(phase: PhaseReport) -> int:
    return phase.copies.get(f"in {MODULE}.load", [0, 0])[1]


def offloaded(phase: PhaseReport) -> int:
    return phase.copies.get(f"out {MODULE}.offload", [0, 0])[1]


@pytest.mark.nightly("verl/workers", "verl/distributed")
def test_nothing_rests_on_the_device_and_only_updates_copy_to_the_host(cluster):
    phases = cluster.measure("tiny", Setup(offload=True, reference=True), RANKS)

    weights, frozen = loaded(phases["sync_weights"]), loaded(phases["ref"])
    assert max(phase.end for phase in phases.values()) < 10_000, "some layouts, no weight"
    assert loaded(phases["old"]) == weights > frozen == weights // 2 > 0, "float32, and a bf16 reference"
    assert [offloaded(phases[name]) for name in ("sync_weights", "old", "ref", "save_checkpoint")] == [0] * 4
    # two updates: the first makes the moments, which the second loads with their step counters
    counters = loaded(phases["update_actor"]) - 4 * weights
    assert 0 < counters < 1000
    assert offloaded(phases["update_actor"]) == 6 * weights + 2 * counters


@pytest.mark.slow
def test_moments_of_shards_that_fsdp_keeps_on_the_host_stay_with_them(cluster):
    phases = cluster.measure("tiny", Setup(offload=True, cpu_offload=True), RANKS)

    assert loaded(phases["update_actor"]) == offloaded(phases["update_actor"]) == 0


@pytest.mark.slow
def test_muon_orthogonalizes_on_the_device_what_fsdp_keeps_on_the_host(cluster):
    here, away = (
        cluster.measure("tiny-moe", Setup(optimizer="muon", cpu_offload=cpu), RANKS)["update_actor"].flops
        for cpu in (False, True)
    )

    assert here == away


@pytest.mark.slow
def test_no_model_leaves_gathered_weights_on_the_device_between_phases(cluster):
    phases = cluster.measure("tiny", Setup(reference=True), RANKS)

    at_rest = phases["init_model"].end
    assert at_rest == phases["sync_weights"].end == phases["old"].end == phases["ref"].end
