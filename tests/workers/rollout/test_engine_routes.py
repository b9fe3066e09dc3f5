# SPDX-License-Identifier: Apache-2.0
"""Routes that engines return: those of the model on the whole sequence, of every token that they ran."""

import pytest
import torch

from tests.workers.rollout.reference import (
    collect,
    engine_params,
    hub_tensors,
    load_model,
    rollout_config,
    setup_of,
)
from verl.config.rollout import SpeculativeConfig
from verl.models.mixture.routing import ChoicePass, ExpertChoices
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions

OPTIONS = SamplingOptions(n=2, max_tokens=12, ignore_eos=True)
# vLLM's CPU cache has blocks of 128 tokens: the last prompt begins with a block of the first one
LONG = torch.randint(8, 300, (150,), generator=torch.Generator().manual_seed(0)).tolist()
REQUESTS = [
    RolloutRequest("long", LONG),
    RolloutRequest("short", [40, 41, 42]),
    RolloutRequest("same", [*LONG[:140], 7, 9]),
]
PROMPTS = {request.uid: request.prompt_token_ids for request in REQUESTS}


DRAFTS = SpeculativeConfig("ngram", num_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
ENGINES = {
    "hf": dict(name="hf"),
    "vllm": dict(name="vllm", max_num_batched_tokens=256),
    "sglang": dict(name="sglang"),
    "drafts": dict(name="vllm", max_num_batched_tokens=256, speculative=DRAFTS),
}


@pytest.fixture(
    scope="module",
    params=[
        "hf",
        *engine_params("vllm", "sglang", marks=[pytest.mark.heavy]),
        pytest.param("drafts", marks=[pytest.mark.heavy, pytest.mark.nightly("verl/models/mixture")]),
    ],
)
def engine_and_model(request, tmp_path_factory, single_process):
    path = save_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_experts=8)
    setup = setup_of(path, records_routes=True)
    engine = build_rollout_engine(rollout_config(**ENGINES[request.param]), setup)
    model = load_model(path)
    engine.sync_weights(hub_tensors(model))
    engine.wake()
    yield engine, model
    engine.close()


def expected_routes(choices, model, response):
    ids = torch.tensor([[*PROMPTS[response.uid], *response.token_ids]])
    with torch.no_grad(), choices.running(ChoicePass(records=True)) as found:
        model(ids)
    return found.routes()


def same_experts(a, b):
    return torch.equal(a.sort(-1).values, b.sort(-1).values)


@pytest.mark.nightly("verl/models/mixture")
def test_an_engine_returns_the_routes_of_all_tokens_but_the_last(engine_and_model):
    engine, model = engine_and_model
    choices = ExpertChoices(model)

    responses = collect(engine, REQUESTS[:2], OPTIONS) | collect(engine, REQUESTS[2:], OPTIONS)

    for response in responses.values():
        expected = expected_routes(choices, model, response)
        assert response.routes.dtype == torch.uint8
        assert same_experts(response.routes, expected[:-1])


@pytest.mark.nightly("verl/models/mixture")
def test_an_interrupted_response_has_its_routes_and_continues_them(engine_and_model):
    engine, model = engine_and_model
    choices, sampling = ExpertChoices(model), ContinuedSampling(engine)
    sampling.submit(REQUESTS, OPTIONS)

    begun = [] if sampling.step(5) else sampling.interrupt()
    sampling.submit(REQUESTS, OPTIONS, {uid: of_uid(begun, uid) for uid in PROMPTS})
    finished = []
    while engine.num_unfinished:
        finished += sampling.step(50)

    assert any(response.token_ids for response in begun)
    for response in begun:
        tokens = len(PROMPTS[response.uid]) + len(response.token_ids)
        assert response.routes is None if not response.token_ids else len(response.routes) == tokens - 1
    for response in finished:
        assert same_experts(response.routes, expected_routes(choices, model, response)[:-1])


def of_uid(responses, uid):
    return {response.sample: response for response in responses if response.uid == uid}
