# SPDX-License-Identifier: Apache-2.0
"""The SGLang engine on images and videos: expanded tokens, and features that a sync makes stale."""

from importlib.util import find_spec

import pytest
from transformers import AutoProcessor

from tests.workers.rollout.media import largest_media_difference, media_requests
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    load_model,
    rollout_config,
    setup_of,
)
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import SamplingOptions

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("sglang") is None, reason="not installed: `make test-sglang` has it"),
]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_log_probs_equal_the_models_after_each_sync_with_the_same_media(kind, tmp_path):
    path = save_tiny_model(tmp_path, kind)
    engine, model = build_rollout_engine(rollout_config(name="sglang"), setup_of(path)), load_model(path)
    processor = AutoProcessor.from_pretrained(path)
    requests = media_requests(processor.tokenizer)

    for seed, temperature in ((1, 1.0), (2, 0.7)):
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        responses = collect(engine, requests, SamplingOptions(n=2, temperature=temperature, max_tokens=12))

        largest, differences = largest_media_difference(model, processor, requests, responses, temperature)
        assert largest < 1e-4, {key: value for key, value in differences.items() if value > 1e-4}
    engine.close()
