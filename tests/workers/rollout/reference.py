# SPDX-License-Identifier: Apache-2.0
"""Log-probs of a response by plain transformers, with which the engines are compared."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from verl.config.rollout import RolloutConfig
from verl.models.families.registry import load_config
from verl.models.hub_names import HubNames, auto_class
from verl.workers.rollout.interface import EngineSetup, RolloutRequest, SamplingOptions

PROMPTS = [[40, 41, 42], [50, 51, 52, 53, 54, 55], [60, 61]]
OPTIONS = SamplingOptions(n=2, max_tokens=24)


def needs_engine(name):
    """The mark of a test that is skipped where the engine's package is missing."""
    reason = "not installed: `make test` has vLLM, `make test-sglang` has SGLang"
    return pytest.mark.skipif(name != "hf" and find_spec(name) is None, reason=reason)


def engine_params(*names, marks=()):
    """The engines of these names, for `parametrize`."""
    return [pytest.param(name, marks=[*marks, needs_engine(name)]) for name in names]


def rollout_config(**changes):
    return replace(RolloutConfig(dtype="fp32", tensor_parallel_size=1), **changes)


def setup_of(path, **changes):
    return EngineSetup(str(path), max_length=256, device="cpu", **changes)


def text_requests():
    return [RolloutRequest(f"prompt {index}", ids) for index, ids in enumerate(PROMPTS)]


def load_model(path):
    config = load_config(path)
    return auto_class(config).from_pretrained(path, config=config, dtype=torch.float32).eval()


@torch.no_grad()
def change_weights(model, seed):
    """Every weight moves, those of embeddings, norms and vision towers too."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def hub_tensors(model):
    return HubNames(model.config).convert(model.state_dict().items())


def collect(engine, requests, options=OPTIONS):
    """All responses, by (uid, sample)."""
    finished = [response for batch in engine.generate(requests, options) for response in batch]
    responses = {(response.uid, response.sample): response for response in finished}
    assert len(responses) == len(finished) == len(requests) * options.n
    return responses


@torch.no_grad()
def reference_log_probs(model, prompt_ids, response_ids, temperature=1.0, **inputs):
    """log softmax(logits / temperature) of the response's tokens, as the trainer defines log-probs."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits = model(input_ids=ids, **inputs).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response_ids)[:, None]).squeeze(-1)


def largest_difference(model, requests, responses, temperature=1.0):
    """Between the engine's log-probs and the reference's, over all tokens of text responses."""
    prompts = {request.uid: request.prompt_token_ids for request in requests}
    differences = []
    for response in responses.values():
        expected = reference_log_probs(model, prompts[response.uid], response.token_ids, temperature)
        differences.append((torch.tensor(response.log_probs) - expected).abs().max())
    return max(differences).item()


def largest_difference_by_version(responses, log_probs):
    """Between each token's log-prob and that of the weights of its version, after all tokens before it.

    `log_probs` has a function for each version, which returns those of a response by the reference.
    """
    differences = []
    for response in responses.values():
        assert len(response.versions) == len(response.token_ids) == len(response.log_probs)
        by_version = torch.stack([reference(response) for reference in log_probs])  # (V, R)
        expected = by_version[response.versions, range(len(response.versions))]
        differences.append((torch.tensor(response.log_probs) - expected).abs().max())
    return max(differences).item()


def text_references(models, requests, temperature=1.0):
    """A function for each model, for `largest_difference_by_version`."""
    prompts = {request.uid: request.prompt_token_ids for request in requests}
    return [
        lambda response, model=model: reference_log_probs(
            model, prompts[response.uid], response.token_ids, temperature
        )
        for model in models
    ]


def finish(sampling):
    """All responses that are being sampled, by (uid, sample)."""
    found = []
    while sampling.num_unfinished:
        found += sampling.step(100)
    return {(response.uid, response.sample): response for response in found}
