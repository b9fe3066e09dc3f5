# SPDX-License-Identifier: Apache-2.0
"""Diffusion runs on a virtual GPU next to their plan: published shapes, some with four layers."""

from dataclasses import replace

import pytest

from tests.virtual.planned_pictures import planned_pictures_run
from tests.virtual.shapes import PictureSetup

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

FEW = PictureSetup(steps=2, layers=4)  # one step is trained
VIDEO = replace(FEW, size=(480, 832), frames=33, prompt_length=512, at_once=1)
CASES = {
    "SD3.5, adapters": ("sd3.5-medium", replace(FEW, lora_rank=32), 8),
    "SD3.5": ("sd3.5-medium", FEW, 1),
    "SD3.5, sharded": ("sd3.5-medium", FEW, 8),
    "SD3.5, without checkpointing": ("sd3.5-medium", replace(FEW, checkpointing=False), 8),
    "SD3.5, all layers": ("sd3.5-medium", replace(FEW, lora_rank=32, layers=None), 8),
    "Wan, adapters": ("wan2.1-1.3b", replace(VIDEO, lora_rank=32), 8),
    "Wan": ("wan2.1-1.3b", VIDEO, 1),
}
NO_STATE_YET = ("encode", "gen", "decode")  # of the first step
TOLERANCE = 0.15
STAGED, LOADED = "diffusion/frozen_parts.py:StagingBuffer.copy", "distributed/offload.py:HostMemory.load"


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_near_the_tracked_peak_and_counts_the_operations(cluster, name):
    shape, setup, ranks = CASES[name]
    phases, planned = cluster.measure(shape, setup, ranks), planned_pictures_run(shape, setup, ranks)

    state = planned.model.state
    ratios = {
        phase: (planned.peaks[phase] - (state if phase in NO_STATE_YET else 0)) / phases[phase].peak
        for phase in (*NO_STATE_YET, "update_actor")
    }
    print({phase: round(ratio, 3) for phase, ratio in ratios.items()})
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=TOLERANCE)
    works = planned.shape
    counts = {"gen": (works.velocity, 2 * setup.steps), "decode": (works.decoding, 2)}
    counts["update_actor"] = works.update, 2 * setup.updates  # of two pictures, each a micro batch
    for phase, (work, number) in counts.items():
        expected = number * (work.products + work.attention)
        assert phases[phase].total_flops == pytest.approx(expected, rel=0.01), phase


def test_each_model_is_copied_to_the_device_once_in_a_phase_and_weights_are_not_copied_back(cluster):
    setup = replace(
        FEW, layers=1, offload=True, at_once=1, responses=3, updates=1
    )  # three calls of the sampler
    phases, planned = (
        measured("sd3.5-medium", setup, 8) for measured in (cluster.measure, planned_pictures_run)
    )

    def copied(phase, place):
        return phases[phase].copies.get(place, [0, 0])[1]

    staged, loaded = (f"in verl/{place}" for place in (STAGED, LOADED))
    assert copied("encode", staged) == pytest.approx(planned.shape.text_encoders, rel=1e-3)
    assert copied("gen", staged) == pytest.approx(planned.shape.vae, rel=1e-3)
    assert copied("gen", loaded) == pytest.approx(planned.model.weights, rel=1e-3)
    assert copied("update_actor", staged) == 0, "its prompts are known"
    returned = sum(size for place, (_, size) in phases["gen"].copies.items() if place.startswith("out"))
    assert returned < planned.shape.buffers + 100 * planned.shape.latent
