# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine on images and videos."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import AutoProcessor

from tests.workers.rollout.media import (
    check_media_after_syncs,
    embedded,
    largest_media_difference,
    media_references,
    media_requests,
)
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    finish,
    hub_tensors,
    largest_difference_by_version,
    load_model,
    rollout_config,
    setup_of,
)
from verl.data.media.decoded import DecodedMedia
from verl.models.hub_names import HubNames
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import SamplingOptions, media_token_ids
from verl.workers.rollout.vllm.sleep_mode import loose_tensors

pytestmark = pytest.mark.heavy

MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
nightly = pytest.mark.nightly("verl/workers/rollout", "verl/models")
FAMILIES = (
    "qwen2_5_vl",
    *(pytest.param(kind, marks=nightly) for kind in ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")),
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, single_process):
    path = save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    engine = build_rollout_engine(rollout_config(limit_images=2), setup_of(path, takes_embeddings=True))
    yield engine, load_model(path), AutoProcessor.from_pretrained(path)
    engine.close()


def test_log_probs_equal_the_models_after_each_sync_with_the_same_media(family):
    check_media_after_syncs(*family)


def test_features_give_the_log_probs_of_their_pixels_after_each_sync(family):
    engine, model, processor = family
    assert engine.takes_embeddings
    requests = media_requests(processor.tokenizer)

    for seed in (3, 4):
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        features = [embedded(model, processor, request) for request in requests]
        responses = collect(engine, features, SamplingOptions(n=2, max_tokens=12))

        largest, differences = largest_media_difference(model, processor, requests, responses)
        assert largest < 1e-4, {key: value for key, value in differences.items() if value > 1e-4}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_response_to_media_continues_with_other_weights(family, is_frozen):
    engine, model, processor = family
    requests = media_requests(processor.tokenizer)
    sampling, models = ContinuedSampling(engine), [deepcopy(model), deepcopy(model)]
    change_weights(models[1].model.language_model if is_frozen else models[1], seed=6)
    given = [embedded(model, processor, request) for request in requests] if is_frozen else requests
    for version, its in enumerate(models):
        with sampling.interrupted(version):
            engine.sync_weights(hub_tensors(its))
        if version == 0:
            sampling.submit(given, SamplingOptions(n=2, max_tokens=12, ignore_eos=True))
            sampling.step(5)

    found = finish(sampling)

    assert {tuple(response.versions) for response in found.values()} == {(0,) * 5 + (1,) * 7}
    assert largest_difference_by_version(found, media_references(models, processor, requests)) < 1e-4


def test_a_frozen_tower_stays_from_the_first_sync(family):
    engine, model, processor = family
    requests = media_requests(processor.tokenizer)
    engine.sync_weights(hub_tensors(model))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in model.model.language_model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    memory = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith("model.visual.")
    }
    assert len(memory) < len(model.state_dict())

    engine.sync_weights(HubNames(model.config).convert(memory.items()))

    responses = collect(engine, requests, SamplingOptions(n=2, max_tokens=12))
    largest, _ = largest_media_difference(model, processor, requests, responses)
    assert largest < 1e-4
    assert all(name.endswith("_scale_cpu") for name in loose_tensors(engine.model))  # in host memory
    some = [(name, tensor) for name, tensor in hub_tensors(model) if "patch_embed" not in name]
    with pytest.raises(RuntimeError, match=r"did not reach parameters .*visual\.patch_embed"):
        engine.sync_weights(some)


def test_media_tokens_are_never_sampled(family):
    engine, model, processor = family
    biased = load_biased_towards_media_tokens(model)
    engine.sync_weights(biased)

    responses = collect(engine, media_requests(processor.tokenizer), SamplingOptions(n=8, max_tokens=20))
    greedy = collect(
        engine, media_requests(processor.tokenizer), SamplingOptions(temperature=0.0, max_tokens=20)
    )

    banned = {processor.tokenizer.convert_tokens_to_ids(token) for token in MEDIA}
    assert set(media_token_ids(model.config)) == banned
    sampled = {token for response in [*responses.values(), *greedy.values()] for token in response.token_ids}
    assert not sampled & banned


def test_a_prompt_with_too_many_images_is_named(family):
    engine, _, processor = family
    request = next(request for request in media_requests(processor.tokenizer) if request.uid == "images")
    more = replace(request, media=DecodedMedia(request.media.images * 2))

    with pytest.raises(ValueError, match=r"`worker.rollout.limit_images` \(2\) .* images has 4"):
        next(engine.generate([more], SamplingOptions()))


def load_biased_towards_media_tokens(model):
    """The model's weights with a head that likes media tokens four times as much as others."""
    ids = media_token_ids(model.config)
    for name, tensor in hub_tensors(model):
        if "embed_tokens" in name or "lm_head" in name:
            tensor = tensor.clone()
            tensor[ids] = tensor[100:104] * 4
        yield name, tensor
