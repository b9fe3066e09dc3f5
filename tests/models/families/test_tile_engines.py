# SPDX-License-Identifier: Apache-2.0
"""Models whose images are tiles in both engines: log-probs are the model's own after each sync."""

import numpy as np
import pytest

from tests.helpers.families import load_tiny, random_clip, random_image
from tests.helpers.family_engines import engine_error
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.workers.rollout.engines import build_rollout_engine

pytestmark = pytest.mark.heavy

KINDS = ("internvl", "llava_onevision")
RNG = np.random.default_rng(0)
IMAGES = [random_image(RNG, 60, 90), random_image(RNG, 120, 60)]
CLIPS = [random_clip(RNG, 3, 60, 80), random_clip(RNG, 3, 40, 40)]
ROWS = [
    ["What colour?"],
    ["a\n", IMAGES[0], "How many?"],
    [IMAGES[0], " or\n", IMAGES[1], "?"],  # of different sizes
    [CLIPS[0], "How many?"],
    ["a\n", CLIPS[1], "red\n", IMAGES[1], "one"],  # the video first
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_log_probs_are_the_models_after_each_sync(kind, name, single_process):
    tiny = load_tiny(kind)
    # a tower is frozen, and these models take no features in vLLM
    setup = setup_of(tiny.folder, takes_embeddings=True)
    engine = build_rollout_engine(rollout_config(name=name, limit_images=2), setup)

    error = engine_error(tiny, engine, ROWS)
    takes_embeddings = engine.takes_embeddings
    engine.close()

    assert error < 1e-4
    assert not takes_embeddings
