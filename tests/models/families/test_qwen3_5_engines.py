# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3-Next in the rollout engines.

vLLM's linear attention on CPU runs in bfloat16 only, so its log-probs are compared with the noise that the
type itself makes: that of the model's own forward in bfloat16.
"""

import pytest
import torch
from transformers import AutoProcessor

from tests.workers.rollout.media import (
    embedded,
    largest_media_difference,
    media_log_probs,
    media_requests,
)
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    load_model,
    reference_log_probs,
    rollout_config,
    setup_of,
    text_requests,
)
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.base import SamplingOptions
from verl.workers.rollout.engines import build_rollout_engine

pytestmark = pytest.mark.heavy

TEXT, VISION = ("qwen3_next", "qwen3_5_text"), ("qwen3_5", "qwen3_5_moe")
SAMPLING = SamplingOptions(n=2, max_tokens=12)


def rounded(model, path):
    """A copy of the model with weights in bfloat16, and one that computes with these weights in float32."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        copy = auto_class(model.config).from_pretrained(path, dtype=dtype).eval()
        copy.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()})
        found.append(copy)
    return found


def log_probs_by(model, processor, request, tokens):
    if processor is None:
        return reference_log_probs(model, request.prompt_token_ids, tokens)
    return media_log_probs(model, processor, request, tokens)


def root_mean_square(parts):
    return torch.cat(parts).square().mean().sqrt().item()


def assert_within_noise(engine, model, path, processor, requests, sent=None):
    """The engine's errors against float32 are those of a model in bfloat16."""
    rough, exact = rounded(model, path)
    by_uid = {request.uid: request for request in requests}
    errors, noise = [], []
    for response in collect(engine, sent or requests, SAMPLING).values():
        arguments = processor, by_uid[response.uid], response.token_ids
        expected = log_probs_by(exact, *arguments)
        errors.append(torch.tensor(response.log_probs) - expected)
        noise.append(log_probs_by(rough, *arguments) - expected)
    assert root_mean_square(errors) < 1.5 * root_mean_square(noise)
    assert root_mean_square(noise) < 0.05


@pytest.mark.parametrize("kind", [*TEXT, *VISION])
def test_vllms_log_probs_have_the_noise_of_bfloat16_after_each_sync(kind, tmp_path, single_process):
    path = save_tiny_model(tmp_path, kind)
    model = load_model(path)
    processor = AutoProcessor.from_pretrained(path) if kind in VISION else None
    requests = media_requests(processor.tokenizer) if processor else text_requests()
    engine = build_rollout_engine(
        rollout_config(dtype="bf16", limit_images=2), setup_of(path, takes_embeddings=kind in VISION)
    )
    try:
        for seed in (1, 2):
            change_weights(model, seed)
            engine.sync_weights(hub_tensors(model))
            assert_within_noise(engine, model, path, processor, requests)
        if processor:
            features = [embedded(model, processor, request) for request in requests]
            assert_within_noise(engine, model, path, processor, requests, features)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", VISION)
def test_the_transformers_engines_log_probs_are_the_models(kind, tmp_path):
    path = save_tiny_model(tmp_path, kind)
    model, processor = load_model(path), AutoProcessor.from_pretrained(path)
    engine = build_rollout_engine(rollout_config(name="hf", limit_images=2), setup_of(path))
    change_weights(model, 1)
    engine.sync_weights(hub_tensors(model))
    requests = media_requests(processor.tokenizer)

    largest, differences = largest_media_difference(
        model, processor, requests, collect(engine, requests, SAMPLING)
    )

    assert largest < 1e-4, {key: value for key, value in differences.items() if value > 1e-4}
