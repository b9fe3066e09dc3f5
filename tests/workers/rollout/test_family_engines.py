# SPDX-License-Identifier: Apache-2.0
"""Models in vLLM: log-probs are the model's own, in bfloat16 up to the noise that this type makes."""

from typing import Any

import numpy as np
import pytest

from tests.helpers.families import load_tiny, random_clip, random_image, random_sound
from tests.helpers.family_engines import assert_cache_is_planned, engine_error, requests_of, rounding_ratio
from tests.workers.rollout.media import largest_media_difference, media_requests
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    load_model,
    rollout_config,
    setup_of,
    text_requests,
)
from verl.models.families.tiny_sizes import MOE
from verl.models.hub_names import HubNames
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import SamplingOptions

pytestmark = pytest.mark.heavy
nightly = pytest.mark.nightly("verl/models")

RNG = np.random.default_rng(0)
IMAGES = [random_image(RNG, 60, 90), random_image(RNG, 120, 60)]
ROWS = [
    ["What colour?"],
    ["a", IMAGES[0], "How many?"],
    [IMAGES[0], " or ", IMAGES[1], "?"],  # of different sizes
]
# Rounding in bfloat16 sends some tokens to other experts, which moves single log-probs by up to 1, and the
# ratio would count such tokens. A token that takes all experts has the noise of its numbers alone.
ALL_EXPERTS: dict[str, dict[str, Any]] = {
    kind: {"num_experts_per_tok": MOE["num_experts"]} for kind in ("qwen3_5_moe", "qwen3_next")
}


def without_encoder(tiny, model=None):
    """The weights that a frozen tower leaves to be synced."""
    weights = (model or tiny.model).state_dict()
    trained = {name: weights[name] for name in weights if not name.startswith(tiny.family.encoder)}
    assert len(trained) < len(weights)
    return trained


@pytest.fixture(
    scope="module",
    params=[pytest.param("mistral3", marks=nightly), pytest.param("ministral3", marks=pytest.mark.slow)],
)
def served(request, single_process):
    tiny = load_tiny(request.param)
    # The tower is frozen, and this engine takes no features.
    engine = build_rollout_engine(
        rollout_config(limit_images=2), setup_of(tiny.folder, takes_embeddings=True)
    )
    assert not engine.takes_embeddings
    yield tiny, engine
    engine.close()


def test_log_probs_are_the_models_after_each_sync(served):
    tiny, engine = served

    assert engine_error(tiny, engine, ROWS) < 1e-4


def test_a_frozen_tower_stays_from_the_first_sync(served):
    tiny, engine = served
    model = load_model(tiny.folder)
    change_weights(model, 1)
    engine.sync_weights(hub_tensors(model))
    change_weights(model.get_submodule("model.language_model"), 2)

    engine.sync_weights(HubNames(model.config).convert(without_encoder(tiny, model).items()))
    requests = requests_of(tiny, ROWS)
    responses = collect(engine, requests, SamplingOptions(n=2, max_tokens=12))

    assert largest_media_difference(model, tiny.processor, requests, responses)[0] < 1e-4


# vLLM's linear attention on CPU runs in bfloat16 only.
@pytest.mark.parametrize(
    "kind", [pytest.param("minicpmv4_6", marks=nightly), pytest.param("minicpmv4_7", marks=pytest.mark.slow)]
)
def test_log_probs_of_recurrent_layers_have_the_noise_of_bfloat16(kind, single_process):
    tiny = load_tiny(kind)
    engine = build_rollout_engine(
        rollout_config(dtype="bf16", limit_images=2), setup_of(tiny.folder, takes_embeddings=True)
    )
    rows = [*ROWS, ["look: ", random_image(RNG, 200, 90)], [random_clip(RNG, 2, 60, 60), "What moves?"]]

    ratio = rounding_ratio(tiny.folder, engine, requests_of(tiny, rows), tiny.processor)
    engine.sync_weights(HubNames(tiny.config).convert(without_encoder(tiny).items()))  # a frozen tower stays
    engine.close()

    assert ratio < 1.5


@pytest.mark.nightly("verl/models")
@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_features_and_pixels_of_a_recurrent_model_have_the_noise_of_bfloat16(kind, single_process):
    tiny = load_tiny(kind, **ALL_EXPERTS.get(kind, {}))
    engine = build_rollout_engine(
        rollout_config(dtype="bf16", limit_images=2), setup_of(tiny.folder, takes_embeddings=True)
    )
    given = tiny.folder, engine, media_requests(tiny.processor.tokenizer), tiny.processor

    ratios = [rounding_ratio(*given, as_features=features, seed=1 + features) for features in (False, True)]
    engine.close()

    assert max(ratios) < 1.5


@pytest.mark.parametrize(
    "kind", [pytest.param("qwen3_next", marks=nightly), pytest.param("qwen3_5_text", marks=pytest.mark.slow)]
)
def test_recurrent_text_models_have_the_noise_of_bfloat16_after_each_sync(kind, tmp_path, single_process):
    path = save_tiny_model(tmp_path, kind, **ALL_EXPERTS.get(kind, {}))
    engine = build_rollout_engine(rollout_config(dtype="bf16"), setup_of(path))

    ratios = [rounding_ratio(path, engine, text_requests(), seed=seed) for seed in (1, 2)]
    assert_cache_is_planned(engine, path)
    engine.close()

    assert max(ratios) < 1.5


@pytest.mark.nightly("verl/models")
@pytest.mark.parametrize("kind", ["qwen2_5_omni", pytest.param("qwen3_omni_moe", marks=nightly)])
def test_a_model_that_hears_has_its_own_log_probs_for_every_kind_of_media(kind, single_process):
    tiny = load_tiny(kind)
    rng = np.random.default_rng(0)
    sounds = [random_sound(rng, seconds) for seconds in (0.4, 4.3)]
    rows = [
        *ROWS,
        [sounds[1], "How many?"],
        ["first ", sounds[0], " then ", IMAGES[0], sounds[1], "?"],
        [random_clip(rng, 4, 64, 64), sounds[0], random_clip(rng, 6, 64, 64, fps=3.0), "What moves?"],
    ]
    # Frames close together, half a second apart, and one in seven seconds; more sound than frames and less.
    films = [
        random_clip(rng, *size, fps=fps)
        for size, fps in (((6, 64, 64), 8.0), ((4, 64, 96), 6.0), ((6, 64, 64), 0.857))
    ]
    lengths = (2.5, 0.4, 21.0)
    heard = [
        clip._replace(sound=random_sound(rng, each).samples)
        for clip, each in zip(films, lengths, strict=True)
    ]
    rows += [[heard[0], "What is heard?"], ["a", heard[1], IMAGES[0], heard[2], " or ", heard[0], "?"]]

    engine = build_rollout_engine(rollout_config(limit_images=2, max_model_len=1024), setup_of(tiny.folder))

    assert engine_error(tiny, engine, rows, seeds=(1,)) < 1e-4
    engine.close()


@nightly
def test_a_model_that_hears_only_has_its_own_log_probs_from_audio_and_from_features(single_process):
    tiny = load_tiny("qwen2_audio")
    rng = np.random.default_rng(0)
    short, long, longest = (random_sound(rng, seconds) for seconds in (0.3, 4.31, 30.0))
    rows = [["What colour?"], [long, "How many?"], ["first ", short, " then ", longest, short, "?"]]
    engine = build_rollout_engine(
        rollout_config(max_model_len=1024), setup_of(tiny.folder, takes_embeddings=True)
    )
    assert engine.takes_embeddings

    errors = [
        engine_error(tiny, engine, rows, as_features=features, seeds=(1,)) for features in (False, True)
    ]
    engine.close()

    assert max(errors) < 1e-4
