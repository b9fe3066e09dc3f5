# SPDX-License-Identifier: Apache-2.0
"""Models whose images are tiles in vLLM: log-probs are the model's own after each sync."""

import importlib
from functools import partial

import numpy as np
import pytest
import torch

from tests.helpers.families import load_tiny, random_clip, random_image
from tests.helpers.family_engines import engine_error
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.models.families.internvl import InternVL
from verl.models.families.llava_onevision import LlavaOnevision
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.vllm.family_patches import take_features_of_any_length
from verl.workers.rollout.vllm.vllm_import import import_vllm

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/workers/rollout")]

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
def test_log_probs_are_the_models_after_each_sync(kind, single_process):
    tiny = load_tiny(kind)
    setup = setup_of(tiny.folder, takes_embeddings=True)  # of a frozen tower
    engine = build_rollout_engine(rollout_config(limit_images=2), setup)

    assert engine.takes_embeddings  # of images only
    errors = [engine_error(tiny, engine, ROWS), engine_error(tiny, engine, ROWS[:3], as_features=True)]
    engine.close()

    assert max(errors) < 1e-4


@pytest.mark.parametrize("family", [InternVL, LlavaOnevision])
def test_vllms_schemas_hold_features_of_images_of_any_length(family):
    import_vllm("cpu")
    (schema,) = family.engine_schemas
    module, _, name = schema.partition(":")
    inputs = partial(getattr(importlib.import_module(module), name), type="image_embeds")

    take_features_of_any_length(schema)

    inputs(data=[torch.zeros(4, 8), torch.zeros(12, 8)])
    inputs(data=torch.zeros(2, 4, 8))
    with pytest.raises(ValueError, match="inconsistent shapes"):
        inputs(data=[torch.zeros(4, 8), torch.zeros(12, 9)])
