# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine on text, alone in its process."""

import random

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tests.helpers.family_engines import assert_cache_is_planned
from tests.helpers.fp8_files import save_in_fp8
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
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions
from verl.workers.rollout.vllm import llm_arguments
from verl.workers.rollout.vllm.sleep_mode import loose_tensors

pytestmark = pytest.mark.heavy
nightly = pytest.mark.nightly("verl/models")


def global_rng_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory, single_process):
    """A tied model and its engine, synced once with other weights than those on disk."""
    path = save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    before = global_rng_states()
    engine = build_rollout_engine(rollout_config(), setup_of(path))
    assert global_rng_states() == before, "building the engine must leave training's random numbers alone"
    with pytest.raises(AssertionError, match="synced before"):
        next(engine.generate(text_requests(), OPTIONS))
    model = load_model(path)
    change_weights(model, seed=1)
    engine.sync_weights(hub_tensors(model))
    yield engine, model
    engine.close()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.7, 1.0, -1), (0.7, 0.8, 20), (1.5, 1.0, -1)]
)
def test_log_probs_are_those_of_the_scaled_logits_before_top_p_and_top_k(qwen2, temperature, top_p, top_k):
    engine, model = qwen2

    responses = collect(engine, text_requests(), SamplingOptions(4, temperature, top_p, top_k, max_tokens=24))

    assert largest_difference(model, text_requests(), responses, temperature) < 1e-4


def test_greedy_sampling_takes_the_likeliest_token_n_times(qwen2):
    engine, model = qwen2
    requests = text_requests()

    responses = collect(engine, requests, SamplingOptions(n=3, temperature=0.0, max_tokens=12))

    assert largest_difference(model, requests, responses) < 1e-4
    for request in requests:
        first, *others = [responses[request.uid, sample].token_ids for sample in range(3)]
        assert others == [first, first]
        ids = torch.tensor([request.prompt_token_ids + first])
        likeliest = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == first


def test_a_second_sync_reaches_prompts_seen_before(qwen2):
    engine, model = qwen2
    requests = text_requests()
    long = [
        request.prompt_token_ids * 50 for request in requests[:1]
    ]  # 150 tokens: more than a block of the cache
    requests = [type(requests[0])("long", long[0])]
    collect(engine, requests)

    change_weights(model, seed=2)
    engine.sync_weights(hub_tensors(model))

    assert largest_difference(model, requests, collect(engine, requests)) < 1e-4


def test_responses_are_yielded_as_they_finish(qwen2):
    engine, _ = qwen2

    batches = list(engine.generate(text_requests(), SamplingOptions(n=16, max_tokens=64)))

    lengths = [{len(response.token_ids) for response in batch} for batch in batches]
    assert len(batches) > 3
    assert all(
        len(of_step) == 1 for of_step in lengths
    )  # all started together: a step ends those of one length
    assert lengths == sorted(lengths, key=min)


def test_a_response_ends_with_an_end_token_or_at_the_limit(qwen2, tmp_path):
    engine, model = qwen2
    ends = model.generation_config.eos_token_id
    assert len(ends) == 2

    responses = collect(engine, text_requests(), SamplingOptions(n=32, max_tokens=40)).values()
    ignoring = collect(engine, text_requests(), SamplingOptions(n=8, max_tokens=40, ignore_eos=True)).values()

    for response in responses:
        assert not set(response.token_ids[:-1]) & set(ends)
        assert response.finish_reason == ("stop" if response.token_ids[-1] in ends else "length")
        assert response.finish_reason == "stop" or len(response.token_ids) == 40
        assert len(response.log_probs) == len(response.token_ids)
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    assert {response.token_ids[-1] for response in responses if response.finish_reason == "stop"} == set(ends)
    assert {(len(response.token_ids), response.finish_reason) for response in ignoring} == {(40, "length")}


def test_each_prompt_is_prepared_once_for_all_its_responses(qwen2, monkeypatch):
    engine, _ = qwen2
    prepared = []
    render = engine.engine.renderer.render_cmpl
    monkeypatch.setattr(
        engine.engine.renderer, "render_cmpl", lambda prompts: prepared.extend(prompts) or render(prompts)
    )

    collect(engine, text_requests(), SamplingOptions(n=5, max_tokens=4))

    assert len(prepared) == len(text_requests())


def test_generation_leaves_the_random_numbers_of_training_alone(qwen2):
    engine, _ = qwen2
    before = global_rng_states()

    between = [global_rng_states() for _ in engine.generate(text_requests(), OPTIONS)]

    assert all(state == before for state in [*between, global_rng_states()])


def test_a_restored_random_stream_continues_with_the_same_tokens(qwen2, tmp_path):
    engine, _ = qwen2
    torch.save(engine.rng_state(), tmp_path / "rng.pt")
    first = collect(engine, text_requests())
    second = collect(engine, text_requests())

    engine.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    again = [collect(engine, text_requests()), collect(engine, text_requests())]

    assert again == [first, second]
    assert first != second


def test_a_seed_repeats_the_tokens_and_still_gives_n_different_samples(qwen2):
    engine, _ = qwen2
    options = SamplingOptions(n=3, max_tokens=20, seed=7)

    first, again = collect(engine, text_requests(), options), collect(engine, text_requests(), options)

    assert first == again
    assert len({tuple(first["prompt 0", sample].token_ids) for sample in range(3)}) == 3


def test_a_rollout_closed_early_leaves_no_requests(qwen2):
    engine, model = qwen2
    iterator = engine.generate(text_requests(), SamplingOptions(n=8, max_tokens=60))
    next(iterator)

    iterator.close()
    engine.sync_weights(hub_tensors(model))

    assert not engine.engine.has_unfinished_requests()
    assert largest_difference(model, text_requests(), collect(engine, text_requests())) < 1e-4


def test_validation_overrides_any_sampling_field(qwen2):
    engine, model = qwen2
    options = OPTIONS.override(
        {"n": 1, "temperature": 0.5, "min_p": 0.2, "logit_bias": {45: 40.0}, "max_tokens": 5}
    )
    assert (options.n, options.temperature, options.max_tokens) == (1, 0.5, 5)

    responses = collect(engine, text_requests(), options)

    assert all(response.token_ids == [45] * 5 for response in responses.values())
    assert largest_difference(model, text_requests(), responses, 0.5) < 1e-4
    with pytest.raises(ValueError, match="no field \\['min_q'\\]"):
        collect(engine, text_requests(), OPTIONS.override({"min_q": 1}))


def test_the_number_of_threads_can_still_be_set(qwen2):
    threads = torch.get_num_threads()

    torch.set_num_threads(threads + 1)

    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_a_sync_with_missing_weights_is_refused(qwen2):
    engine, model = qwen2
    tensors = [
        (name, tensor) for name, tensor in hub_tensors(model) if "layers.1.input_layernorm" not in name
    ]

    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        engine.sync_weights(iter(tensors))

    engine.sync_weights(hub_tensors(model))


def test_a_tied_head_is_consumed_and_left_out(qwen2):
    engine, model = qwen2
    consumed = []

    def tensors():
        for name, tensor in [*hub_tensors(model), ("lm_head.weight", torch.full((1,), torch.nan))]:
            consumed.append(name)
            yield name, tensor

    engine.sync_weights(tensors())

    assert consumed[-1] == "lm_head.weight"
    assert largest_difference(model, text_requests(), collect(engine, text_requests())) < 1e-4


@torch.no_grad()
def logits_of_bf16_engine(path, monkeypatch):
    """Logits that a bfloat16 engine samples from, and those of the same hidden states in float32."""
    engine = build_rollout_engine(rollout_config(dtype="bf16"), setup_of(path))
    model = load_model(path)
    model.get_output_embeddings().weight.mul_(6)  # logits as large as those of trained models
    engine.sync_weights(hub_tensors(model))
    assert engine.model.lm_head.weight.dtype == torch.bfloat16
    seen = []
    compute = engine.model.compute_logits

    def record(hidden_states, *args, **kwargs):
        logits = compute(hidden_states, *args, **kwargs)
        seen.append((hidden_states.clone(), logits.clone()))
        return logits

    monkeypatch.setattr(engine.model, "compute_logits", record)
    collect(engine, text_requests(), SamplingOptions(n=4, max_tokens=16))
    head = engine.model.lm_head.weight.float()
    engine.close()
    hidden, logits = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return logits, hidden.float() @ head.t()[:, : logits.shape[-1]]


@nightly
def test_the_head_of_gpus_gives_float32_logits_of_bfloat16_weights(tmp_path, single_process, monkeypatch):
    path = save_tiny_model(tmp_path, "deepseek")  # a head of its own
    rounded, exact = logits_of_bf16_engine(path, monkeypatch)
    rounding = (rounded - exact).abs()

    monkeypatch.setattr(llm_arguments, "_head_dtype", lambda _: "float32")
    logits, exact = logits_of_bf16_engine(path, monkeypatch)

    assert exact.abs().max() > 16
    assert rounding.max() > 0.03  # half of bfloat16's spacing from 16 to 32 is 0.0625
    torch.testing.assert_close(logits, exact, atol=1e-4, rtol=1e-5)


@pytest.mark.nightly
def test_prompts_in_parts_have_the_log_probs_of_whole_ones(tmp_path, single_process):
    path = save_tiny_model(tmp_path, "qwen2")
    model = load_model(path)
    # the budget of a step is a third of the longest prompt
    options = dict(enable_chunked_prefill=True, max_num_batched_tokens=64)
    engine = build_rollout_engine(rollout_config(**options), setup_of(path))
    engine.sync_weights(hub_tensors(model))
    requests = [RolloutRequest(str(length), [40 + i % 50 for i in range(length)]) for length in (200, 70, 3)]

    difference = largest_difference(model, requests, collect(engine, requests))
    engine.close()

    assert difference < 1e-4


@pytest.mark.nightly("verl/models")
@pytest.mark.parametrize(
    "family", [*(pytest.param(kind, marks=nightly) for kind in ("deepseek", "gemma3")), "qwen3_moe"]
)
def test_log_probs_equal_the_models_after_each_sync(family, tmp_path, single_process):
    # deepseek: a head of its own; gemma3: sliding windows; qwen3_moe: experts joined in memory
    path = save_tiny_model(tmp_path, family)
    GenerationConfig(eos_token_id=2).save_pretrained(path)
    engine = build_rollout_engine(rollout_config(), setup_of(path))
    model = load_model(path)

    differences = []
    for seed in (1, 2):
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        differences.append(largest_difference(model, text_requests(), collect(engine, text_requests())))
    loose = loose_tensors(engine.model)  # sleep would discard them
    assert_cache_is_planned(engine, path)
    engine.close()

    assert max(differences) < 1e-4
    assert all(name.endswith("_scale_cpu") for name in loose)  # in host memory


@nightly
def test_an_engine_of_a_model_in_fp8_samples_with_the_synced_weights(tmp_path, single_process):
    path = save_tiny_model(tmp_path, "qwen3", hidden_size=256, intermediate_size=192)
    model = load_model(path)
    save_in_fp8(path)
    engine = build_rollout_engine(rollout_config(), setup_of(path))

    change_weights(model, seed=1)
    engine.sync_weights(hub_tensors(model))
    difference = largest_difference(model, text_requests(), collect(engine, text_requests()))
    engine.close()

    assert difference < 1e-4
