# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine on a GPU: log-probs after a sync, and the memory that sleeping frees."""

from dataclasses import replace

import pytest
import torch

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
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import SamplingOptions

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def engine_and_model(tmp_path_factory, single_process):
    pytest.importorskip("vllm")
    path = save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    config = rollout_config(dtype="bf16", gpu_memory_utilization=0.2)
    engine = build_rollout_engine(config, replace(setup_of(path), device="cuda"))
    yield engine, load_model(path)
    engine.close()


def mean_difference(model, responses):
    """In bfloat16 single tokens differ by a few hundredths, and a wrong sync by more than one on average."""
    prompts = {request.uid: request.prompt_token_ids for request in text_requests()}
    differences = [
        torch.tensor(response.log_probs) - reference_log_probs(model, prompts[uid], response.token_ids)
        for (uid, _), response in responses.items()
    ]
    return torch.cat(differences).abs().mean().item()


def test_sleeping_frees_memory_and_later_syncs_take_effect(engine_and_model):
    engine, model = engine_and_model
    for seed in (1, 2):
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        engine.wake()
        training = torch.cuda.get_rng_state()
        responses = collect(engine, text_requests(), SamplingOptions(n=8, max_tokens=32))
        assert torch.equal(torch.cuda.get_rng_state(), training)
        assert mean_difference(model, responses) < 0.05

        free_awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > free_awake + (1 << 30)


def test_a_restored_random_stream_continues_with_the_same_tokens(engine_and_model):
    engine, model = engine_and_model
    engine.sync_weights(hub_tensors(model))
    state = engine.rng_state()
    first = collect(engine, text_requests())

    engine.set_rng_state(state)

    again = collect(engine, text_requests())
    assert {key: one.token_ids for key, one in again.items()} == {
        key: one.token_ids for key, one in first.items()
    }
