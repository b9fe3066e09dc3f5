# SPDX-License-Identifier: Apache-2.0
"""Both engines on the media of each family whose model runs in vLLM's build for CPUs in float32."""

import numpy as np
import pytest

from tests.helpers.families import load_tiny, random_clip, random_image
from tests.helpers.family_engines import engine_error, requests_of, rounding_ratio
from tests.workers.rollout.media import largest_media_difference
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    load_model,
    rollout_config,
    setup_of,
)
from verl.models.hub_names import HubNames
from verl.workers.rollout.base import SamplingOptions
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


def without_encoder(tiny, model=None):
    """The weights that a frozen tower leaves to be synced."""
    weights = (model or tiny.model).state_dict()
    trained = {name: weights[name] for name in weights if not name.startswith(tiny.family.encoder)}
    assert len(trained) < len(weights)
    return trained


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tower_stays_from_the_first_sync(kind, single_process):
    tiny, model = load_tiny(kind), load_model(load_tiny(kind).folder)
    # The tower is frozen, and this engine takes no features.
    engine = build_rollout_engine(
        rollout_config(limit_images=2), setup_of(tiny.folder, takes_embeddings=True)
    )
    assert not engine.takes_embeddings
    change_weights(model, 1)
    engine.sync_weights(hub_tensors(model))
    change_weights(model.get_submodule("model.language_model"), 2)

    engine.sync_weights(HubNames(model.config).convert(without_encoder(tiny, model).items()))
    requests = requests_of(tiny, ROWS)
    responses = collect(engine, requests, SamplingOptions(n=2, max_tokens=12))
    engine.close()

    assert largest_media_difference(model, tiny.processor, requests, responses)[0] < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_log_probs_are_the_models_after_each_sync(kind, name, single_process):
    tiny = load_tiny(kind)
    engine = build_rollout_engine(rollout_config(name=name, limit_images=2), setup_of(tiny.folder))

    error = engine_error(tiny, engine, ROWS)
    engine.close()

    assert error < 1e-4


@pytest.mark.parametrize("kind", ["minicpmv4_6", "minicpmv4_7"])
def test_log_probs_of_recurrent_layers_have_the_noise_of_bfloat16(kind, single_process):
    # vLLM's linear attention on CPU runs in bfloat16 only.
    tiny = load_tiny(kind)
    engine = build_rollout_engine(
        rollout_config(dtype="bf16", limit_images=2), setup_of(tiny.folder, takes_embeddings=True)
    )
    rows = [*ROWS, ["look: ", random_image(RNG, 200, 90)], [random_clip(RNG, 2, 60, 60), "What moves?"]]

    ratio = rounding_ratio(tiny, engine, rows)
    engine.sync_weights(HubNames(tiny.config).convert(without_encoder(tiny).items()))  # a frozen tower stays
    engine.close()

    assert ratio < 1.5
