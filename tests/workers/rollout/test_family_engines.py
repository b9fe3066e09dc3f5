# SPDX-License-Identifier: Apache-2.0
"""Both engines on the media of each family whose model runs in vLLM's build for CPUs in float32."""

import numpy as np
import pytest

from tests.helpers.families import load_tiny, random_image
from tests.helpers.family_engines import engine_error
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.workers.rollout.engines import build_rollout_engine

pytestmark = pytest.mark.heavy

KINDS = ("mistral3", "ministral3")
RNG = np.random.default_rng(0)
IMAGES = [random_image(RNG, 60, 90), random_image(RNG, 120, 60)]
ROWS = [
    ["What colour?"],
    ["a", IMAGES[0], "How many?"],
    [IMAGES[0], " or ", IMAGES[1], "?"],  # of different sizes
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_log_probs_are_the_models_after_each_sync(kind, name, single_process):
    tiny = load_tiny(kind)
    engine = build_rollout_engine(rollout_config(name=name, limit_images=2), setup_of(tiny.folder))

    error = engine_error(tiny, engine, ROWS)
    engine.close()

    assert error < 1e-4
