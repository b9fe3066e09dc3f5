# SPDX-License-Identifier: Apache-2.0
"""GLM-4.xV in vLLM: log-probs are the model's own, on text, images and videos."""

import pytest
import torch
from transformers import AutoProcessor

from tests.workers.rollout.media import film, largest_media_difference, media_requests, picture
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    load_model,
    rollout_config,
    setup_of,
)
from verl.data.media.decoded import DecodedMedia
from verl.models.families.glm_v import VIDEO, GlmV
from verl.models.hub_names import HubNames
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions, media_token_ids

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/workers/rollout")]

SERVED = [
    "glm4v",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("glm4v_moe", "hub")),
    pytest.param("glm46v", marks=pytest.mark.slow),  # by vLLM's Transformers backend
]
SAMPLING = SamplingOptions(n=2, max_tokens=12)


def save(folder, kind):
    """Write a tiny model; `hub` is what checkpoints of GLM-4.6V are: a GLM-4.5V with another processor."""
    path = save_tiny_model(folder, "glm4v_moe" if kind == "hub" else kind)
    if kind == "hub":
        tokenizer = AutoProcessor.from_pretrained(path).tokenizer
        processor = GlmV.tiny["glm46v"].processor(tokenizer)
        processor.chat_template = tokenizer.chat_template
        processor.save_pretrained(path)
    return path


def moved(model, seed):
    """Change every weight, those of the router's choice too, which are no parameters."""
    change_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)


def requests_for(processor):
    return media_requests(processor.tokenizer, GlmV.tiny["glm4v"])


@pytest.fixture(scope="module", params=SERVED)
def served(request, tmp_path_factory, single_process):
    path = save(tmp_path_factory.mktemp(request.param), request.param)
    # a tower is frozen, and this engine takes no features
    engine = build_rollout_engine(rollout_config(limit_images=2), setup_of(path, takes_embeddings=True))
    assert not engine.takes_embeddings
    yield engine, load_model(path), AutoProcessor.from_pretrained(path)
    engine.close()


def assert_log_probs_are_the_models(engine, model, processor, requests):
    responses = collect(engine, requests, SAMPLING)
    largest, differences = largest_media_difference(model, processor, requests, responses)
    assert largest < 1e-4, {key: value for key, value in differences.items() if value > 1e-4}


def test_vllms_log_probs_are_the_models_after_each_sync(served):
    engine, model, processor = served
    for seed in (1, 2):
        moved(model, seed)
        engine.sync_weights(hub_tensors(model))

        assert_log_probs_are_the_models(engine, model, processor, requests_for(processor))


def test_vllm_writes_the_times_of_frames_that_the_processor_writes(served):
    engine, model, processor = served
    engine.sync_weights(hub_tensors(model))
    frames, meta = film(3)
    odd = meta | {"fps": 3.3, "frames_indices": [1, 3, 4, 9, 12, 20]}
    text = f"How many? {VIDEO}"
    request = RolloutRequest("odd", processor.tokenizer.encode(text), DecodedMedia([], [(frames, odd)]))

    assert_log_probs_are_the_models(engine, model, processor, [request])


def test_vllm_takes_several_videos_in_a_prompt(served):
    engine, model, processor = served
    engine.sync_weights(hub_tensors(model))
    media = DecodedMedia([picture(1)], [film(3), film(4, frames=4)])
    text = f"{VIDEO} or {GlmV.tiny['glm4v'].image} or {VIDEO}?"
    request = RolloutRequest("two", processor.tokenizer.encode(text), media)

    assert_log_probs_are_the_models(engine, model, processor, [request])


def test_a_frozen_tower_stays_in_vllm_from_the_first_sync(served):
    engine, model, processor = served
    engine.sync_weights(hub_tensors(model))
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.mul_(1.02)
    memory = {name: value for name, value in model.state_dict().items() if "model.visual." not in name}
    assert len(memory) < len(model.state_dict())

    engine.sync_weights(HubNames(model.config).convert(memory.items()))

    assert_log_probs_are_the_models(engine, model, processor, requests_for(processor))


def test_tokens_of_media_are_never_sampled(served):
    _, model, processor = served
    names = ["image", "video"]
    names += [f"{edge}_of_{kind}" for edge in ("begin", "end") for kind in ("image", "video")]
    tokens = [f"<|{name}|>" for name in names]

    assert set(media_token_ids(model.config)) == set(processor.tokenizer.convert_tokens_to_ids(tokens))
