# SPDX-License-Identifier: Apache-2.0
"""VILA's tiles, scales, pooling and folders, worked out by hand or in a second way; its rollout engine."""

import numpy as np
import pytest

from tests.helpers.families import load_tiny, random_clip, random_image
from tests.helpers.family_engines import engine_error
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.workers.rollout.engines import build_rollout_engine


@pytest.mark.heavy
def test_the_language_model_in_vllm_has_the_models_log_probs_after_prompts_as_embeddings(single_process):
    tiny, rng = load_tiny("vila"), np.random.default_rng(0)
    rows = [
        ["What colour is the shape?"],
        ["look:\n", random_image(rng, 80, 160), " or\n", random_image(rng, 64, 64), "?"],
        [random_clip(rng, 4, 64, 64), "What moves?"],
        ["first\n", random_clip(rng, 3, 40, 80), "then\n", random_image(rng, 200, 60)],
    ]
    engine = build_rollout_engine(rollout_config(), setup_of(tiny.folder))

    error = engine_error(tiny, engine, rows, as_features=True)
    engine.close()

    assert error < 1e-4
