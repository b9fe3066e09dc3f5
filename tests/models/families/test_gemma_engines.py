# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and 4 in vLLM: log-probs are the model's own, on text, images and videos."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.families import load_tiny, random_clip, random_image
from tests.helpers.family_engines import assert_cache_is_planned, engine_error
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.workers.rollout.engines import build_rollout_engine

RNG = np.random.default_rng(0)
WIDE, SMALL = random_image(RNG, 60, 90), random_image(RNG, 30, 30)
CLIP = random_clip(RNG, 3, 40, 60)
# Prompts are longer than the sliding window of 16 tokens; newlines around an image join its own.
ROWS = [
    ["What colour is the shape?"],
    ["First, we add the numbers; then\n", WIDE, "\n\nHow many?"],
    [WIDE, " or ", SMALL],
]
VIDEO = ["How many? ", CLIP, " and ", WIDE]
OPTIONS = {
    "gemma3_vl": {},
    "gemma4": {},
    # Images of up to 70 tokens stay within it, as vLLM's windows reach both ways there.
    "gemma4_moe": {"sliding_window": 128},
}


def rows_of(kind):
    return ROWS if kind == "gemma3_vl" else [*ROWS, VIDEO]


def long_setup(tiny):
    return replace(setup_of(tiny.folder), max_length=512)


@pytest.mark.heavy
@pytest.mark.nightly("verl/workers/rollout")
@pytest.mark.parametrize("kind", ["gemma3_vl", "gemma4", pytest.param("gemma4_moe", marks=pytest.mark.slow)])
def test_vllm_samples_with_the_models_own_log_probs(kind, single_process):
    tiny = load_tiny(kind, **OPTIONS[kind])
    engine = build_rollout_engine(rollout_config(limit_images=2), long_setup(tiny))
    try:
        assert engine_error(tiny, engine, rows_of(kind)) < 1e-4
        assert_cache_is_planned(engine, tiny.folder)
    finally:
        engine.close()
