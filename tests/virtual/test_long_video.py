# SPDX-License-Identifier: Apache-2.0
"""An hour of video on one node: LongVILA-R1-7B with 3,600 frames, 925,264 tokens and eight responses."""

import pytest

from tests.virtual.planned import Case, planned
from tests.virtual.shapes import Setup, video

GIB = 1 << 30
FRAMES, RANKS = 3600, 8
USABLE = 0.9 * 80e9  # of a GPU with 80 GB: allocators need the rest
OTHERS = 4 * GIB  # contexts, and what vLLM keeps while it sleeps, as planned


@pytest.mark.slow
def test_an_hour_of_video_fits_eight_gpus_of_80_gb(cluster):
    phases = cluster.measure("longvila-7b", Setup(**video(FRAMES)), RANKS)  # two updates: with moments

    peaks = {name: phase.peak for name, phase in phases.items()}
    print({name: round(peak / GIB, 1) for name, peak in peaks.items()})
    assert max(peaks, key=peaks.__getitem__) == "update_actor"
    assert peaks["update_actor"] + OTHERS < USABLE


def test_the_plan_of_an_hour_says_so_too():
    plan = planned(Case("longvila-7b", RANKS, video(FRAMES)), layers=28)

    assert max(plan.peaks, key=plan.peaks.__getitem__) == "update_actor"
    assert 0.75 * USABLE < plan.peaks["update_actor"] + OTHERS < USABLE
