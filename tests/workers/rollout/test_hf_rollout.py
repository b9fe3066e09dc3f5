# SPDX-License-Identifier: Apache-2.0
"""The transformers engine: the same tokens and log-probs as vLLM, from another implementation."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoProcessor

from tests.helpers.fp8_files import save_in_fp8
from tests.workers.rollout.media import largest_media_difference, media_requests
from tests.workers.rollout.reference import (
    OPTIONS,
    change_weights,
    collect,
    hub_tensors,
    largest_difference,
    load_model,
    rollout_config,
    setup_of,
    text_requests,
)
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import _hub_weights, build_rollout_engine, standalone_engine
from verl.workers.rollout.hf.batches import RunningBatch, sample_tokens
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions, media_token_ids

pytestmark = pytest.mark.heavy
nightly = pytest.mark.nightly("verl/models")

GREEDY = SamplingOptions(n=2, temperature=0.0, max_tokens=24)


def hf_engine(path, **changes):
    return build_rollout_engine(rollout_config(name="hf", **changes), setup_of(path))


def assert_same_responses(one, other):
    assert one.keys() == other.keys()
    for key, response in one.items():
        assert (response.token_ids, response.finish_reason) == (
            other[key].token_ids,
            other[key].finish_reason,
        ), key
        difference = torch.tensor(response.log_probs) - torch.tensor(other[key].log_probs)
        assert difference.abs().max() < 1e-4


@pytest.mark.parametrize(
    "family",
    [pytest.param(kind, marks=nightly) for kind in ("qwen2_5_vl", "qwen2", "gemma3", "qwen3_moe")],
)
def test_greedy_responses_equal_vllms(family, tmp_path, single_process):
    path = save_tiny_model(tmp_path, family)
    model = load_model(path)
    change_weights(model, seed=1)
    requests = text_requests()
    if media_token_ids(model.config):
        requests = media_requests(AutoProcessor.from_pretrained(path).tokenizer)
    hf, vllm = hf_engine(path), build_rollout_engine(rollout_config(), setup_of(path))
    for engine in (hf, vllm):
        engine.sync_weights(hub_tensors(model))

    expected = collect(vllm, requests, GREEDY)
    vllm.close()

    assert_same_responses(collect(hf, requests, GREEDY), expected)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    path = save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    engine, model = hf_engine(path), load_model(path)
    change_weights(model, seed=1)
    engine.sync_weights(hub_tensors(model))
    return engine, model


def test_log_probs_are_those_of_the_scaled_logits_before_top_p_and_top_k(qwen2):
    engine, model = qwen2

    responses = collect(engine, text_requests(), SamplingOptions(4, 0.7, 0.8, 20, max_tokens=24))

    assert largest_difference(model, text_requests(), responses, temperature=0.7) < 1e-4


def test_log_probs_of_media_prompts_equal_the_models(tmp_path):
    path = save_tiny_model(tmp_path, "qwen3_vl")
    engine, model, processor = hf_engine(path), load_model(path), AutoProcessor.from_pretrained(path)
    requests = media_requests(processor.tokenizer)

    responses = collect(engine, requests, OPTIONS)

    assert largest_media_difference(model, processor, requests, responses)[0] < 1e-4


def test_results_do_not_depend_on_how_prompts_are_batched(qwen2, monkeypatch):
    engine, _ = qwen2
    together = collect(engine, text_requests(), GREEDY)

    monkeypatch.setattr(engine, "max_prompt_tokens", 1)

    assert_same_responses(collect(engine, text_requests(), GREEDY), together)


def test_a_restored_random_stream_continues_with_the_same_tokens(qwen2):
    engine, _ = qwen2
    training = torch.get_rng_state()
    state = engine.rng_state()
    first, second = collect(engine, text_requests()), collect(engine, text_requests())

    engine.set_rng_state(state)

    assert [collect(engine, text_requests()), collect(engine, text_requests())] == [first, second]
    assert first != second
    assert torch.equal(torch.get_rng_state(), training)


def test_a_response_ends_with_an_end_token_or_at_the_limit(qwen2):
    engine, model = qwen2

    responses = collect(engine, text_requests(), SamplingOptions(n=32, max_tokens=40)).values()
    ignoring = collect(engine, text_requests(), SamplingOptions(n=2, max_tokens=40, ignore_eos=True)).values()

    ends = set(model.generation_config.eos_token_id)
    for response in responses:
        assert not set(response.token_ids[:-1]) & ends
        assert response.finish_reason == ("stop" if response.token_ids[-1] in ends else "length")
    assert {response.token_ids[-1] for response in responses if response.finish_reason == "stop"} == ends
    assert {(len(response.token_ids), response.finish_reason) for response in ignoring} == {(40, "length")}


def test_top_p_top_k_and_banned_tokens_limit_the_choice_and_not_the_log_probs():
    # probabilities 0.4, 0.3, 0.2, 0.1
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(512, 1)
    generator = torch.Generator().manual_seed(0)

    def draw(probabilities):
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    chosen = {
        "all": sample_tokens(logits, SamplingOptions(), [], draw),
        "top two": sample_tokens(logits, SamplingOptions(top_k=2), [], draw),
        "top 0.6": sample_tokens(logits, SamplingOptions(top_p=0.6), [], draw),
        "not 0": sample_tokens(logits, SamplingOptions(temperature=0.0), [0], draw),
    }

    assert {name: set(tokens.tolist()) for name, (tokens, _) in chosen.items()} == {
        "all": {0, 1, 2, 3}, "top two": {0, 1}, "top 0.6": {0, 1}, "not 0": {1}
    }  # fmt: skip
    for tokens, log_probs in chosen.values():
        torch.testing.assert_close(log_probs, logits[0, tokens])


def test_unsupported_options_are_refused_by_name(qwen2, tmp_path):
    engine, _ = qwen2

    with pytest.raises(ValueError, match="cannot sample with \\['min_p'\\]"):
        collect(engine, text_requests(), OPTIONS.override({"min_p": 0.1}))
    with pytest.raises(NotImplementedError, match="tensor_parallel_size` must be 1, got 2"):
        hf_engine(tmp_path, tensor_parallel_size=2)


class ForwardShapes:
    """The engine's forward, which notes the shape of each of its inputs."""

    def __init__(self, engine, monkeypatch):
        self.forward, self.shapes = engine._forward, []
        monkeypatch.setattr(engine, "_forward", self)

    def __call__(self, input_ids, *rest):
        self.shapes.append(tuple(input_ids.shape))
        return self.forward(input_ids, *rest)

    def of_prompts(self):
        return [shape for shape in self.shapes if shape[1] > 1]


@pytest.mark.parametrize("seed", [None, 3])
def test_leaving_out_finished_rows_changes_nothing_but_the_work(qwen2, monkeypatch, seed):
    engine, _ = qwen2
    options = SamplingOptions(n=8, temperature=0.8, top_p=0.95, max_tokens=60, seed=seed)
    requests = [
        replace(request, seed_offset=place, max_tokens=limit)
        for place, (request, limit) in enumerate(zip(text_requests(), (10, 20, 60), strict=True))
    ]
    state, shapes = engine.rng_state(), ForwardShapes(engine, monkeypatch)

    found = collect(engine, requests, options)
    rows = [rows for rows, length in shapes.shapes if length == 1]
    engine.set_rng_state(state)
    monkeypatch.setattr(RunningBatch, "_leave_out_finished", lambda batch: None)
    whole = collect(engine, requests, options)

    assert_same_responses(found, whole)
    lengths = [len(response.token_ids) for response in found.values()]
    for step, rows_of_step in enumerate(rows, start=1):
        assert rows_of_step < 2 * sum(length > step for length in lengths)
    assert rows[0] == 24 > 8 >= rows[-1]


def test_a_model_with_states_and_sliding_windows_leaves_out_rows_too(tmp_path):
    for family in ("gemma3", "qwen3_5"):
        path = tmp_path / family
        path.mkdir()
        save_tiny_model(path, family)
        engine, model = hf_engine(path), load_model(path)
        requests = [
            replace(request, max_tokens=limit)
            for request, limit in zip(text_requests(), (3, 5, 40), strict=True)
        ]

        responses = collect(engine, requests, replace(GREEDY, n=1, ignore_eos=True))

        assert len(responses["prompt 2", 0].token_ids) == 40
        assert largest_difference(model, requests, responses) < 1e-4


def test_prompts_wait_until_running_ones_leave_room(qwen2, monkeypatch):
    engine, _ = qwen2
    options = replace(GREEDY, n=1, ignore_eos=True)
    first, second, third = (
        RolloutRequest(name, [*range(40, 40 + length)], max_tokens=limit)
        for name, length, limit in (("first", 10, 4), ("second", 10, 9), ("third", 12, 9))
    )
    expected = collect(engine, [first, second, third], options)
    monkeypatch.setattr(engine, "max_prompt_tokens", 23)
    shapes = ForwardShapes(engine, monkeypatch)

    engine.submit([first, second, third], options)
    starts = []
    responses = {}
    while engine.num_unfinished:
        responses |= {(one.uid, one.sample): one for one in engine.step()}
        starts.append(len(shapes.of_prompts()))

    # 2 x 10 tokens fit at once; the third prompt follows when the first is left out after its 4 tokens
    assert shapes.of_prompts() == [(2, 10), (1, 12)]
    assert starts[:6] == [1, 1, 1, 1, 2, 2]
    assert_same_responses(responses, expected)


def test_an_engine_that_reads_a_model_in_fp8_samples_with_what_its_weights_stand_for(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen3", hidden_size=256, intermediate_size=192)
    model = load_model(folder)
    model.load_state_dict(save_in_fp8(folder), strict=False)

    with standalone_engine("hf", str(folder), device="cpu", dtype="fp32", max_length=160, seed=1) as engine:
        responses = collect(engine, text_requests(), GREEDY)

    assert largest_difference(model, text_requests(), responses) < 1e-4
    weights = dict(_hub_weights(str(folder), "fp32", False))  # of the other engines
    assert all(torch.equal(weights[name], value) for name, value in hub_tensors(model))


def test_a_prompt_larger_than_the_room_runs_alone(qwen2, monkeypatch):
    engine, _ = qwen2
    monkeypatch.setattr(engine, "max_prompt_tokens", 1)
    shapes = ForwardShapes(engine, monkeypatch)

    responses = collect(engine, text_requests(), GREEDY)

    assert len(responses) == 6
    assert shapes.of_prompts() == [(1, 3), (1, 6), (1, 2)]


def test_prompts_of_other_sampling_options_get_a_batch_of_their_own(qwen2, monkeypatch):
    engine, model = qwen2
    first, second, third = text_requests()
    shapes = ForwardShapes(engine, monkeypatch)

    engine.submit([first], GREEDY)
    engine.submit([second], replace(GREEDY, max_tokens=3, seed=1))  # neither of these keeps them apart
    engine.submit([third], SamplingOptions(n=5, top_k=3, max_tokens=8))
    responses = {}
    while engine.num_unfinished:
        responses |= {(one.uid, one.sample): one for one in engine.step()}

    assert shapes.of_prompts() == [(2, 6), (1, 2)]
    assert len(responses) == 2 + 2 + 5
    assert {len(responses[second.uid, sample].token_ids) for sample in range(2)} == {3}
    assert largest_difference(model, text_requests(), responses) < 1e-4
