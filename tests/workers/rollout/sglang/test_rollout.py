# SPDX-License-Identifier: Apache-2.0
"""The SGLang engine: log-probs, weights that change under responses, and its ends."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
import torch

from tests.workers.rollout.reference import (
    change_weights,
    collect,
    finish,
    hub_tensors,
    largest_difference,
    largest_difference_by_version,
    load_model,
    needs_engine,
    rollout_config,
    setup_of,
    text_references,
    text_requests,
)
from verl.models.mixture.routing import ChoicePass, ExpertChoices
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import INTERRUPTED, SamplingOptions
from verl.workers.rollout.sglang.sglang_process import SGLangDiedError, SGLangFailedError

pytestmark = [pytest.mark.heavy, needs_engine("sglang")]

LONG = SamplingOptions(n=2, temperature=0.8, max_tokens=150, ignore_eos=True)


def start(folder, family="qwen2", **setup):
    path = save_tiny_model(folder, family)
    return build_rollout_engine(rollout_config(name="sglang"), setup_of(path, **setup)), load_model(path)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    engine, model = start(tmp_path_factory.mktemp("qwen2"))
    yield engine, model
    engine.close()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    engine, model = start(tmp_path_factory.mktemp("mixture"), "qwen3_moe", records_routes=True)
    yield engine, model
    engine.close()


def interrupted_after_a_token(sampling, submitted):
    """Interrupt until every response has a token; `submitted` submits what each has so far."""
    begun = {}
    while True:
        submitted(begun)
        assert sampling.step() == []
        begun = {}
        for response in sampling.interrupt():
            begun.setdefault(response.uid, {})[response.sample] = response
        if all(response.token_ids for its in begun.values() for response in its.values()):
            return begun


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0.6, top_p=0.8, top_k=20),
        SamplingOptions(temperature=1.0, extra={"logit_bias": {5: 6.0}, "min_p": 0.01}),
        SamplingOptions(temperature=1.3, extra={"presence_penalty": 1.5, "stop_token_ids": [7, 8]}),
        SamplingOptions(temperature=0.0),
    ],
    ids=["truncated", "bias", "penalty", "greedy"],
)
def test_log_probs_are_those_of_the_scaled_logits_before_all_else(qwen2, options):
    engine, model = qwen2
    change_weights(model, seed=1)
    engine.sync_weights(hub_tensors(model))

    responses = collect(engine, text_requests(), replace(options, n=4, max_tokens=24))

    assert largest_difference(model, text_requests(), responses, options.logit_temperature) < 1e-5
    if "logit_bias" in options.extra:
        tokens = [token for response in responses.values() for token in response.token_ids]
        assert tokens.count(5) > len(tokens) / 4  # 1 in 512 without the bias
    if "stop_token_ids" in options.extra:
        assert all(set(response.token_ids[:-1]).isdisjoint([7, 8]) for response in responses.values())


def test_a_restored_random_stream_repeats_the_tokens(qwen2):
    engine, model = qwen2
    engine.sync_weights(hub_tensors(model))
    state = engine.rng_state()
    first = collect(engine, text_requests(), replace(LONG, max_tokens=20))
    other = collect(engine, text_requests(), replace(LONG, max_tokens=20))

    engine.set_rng_state(state)
    again = collect(engine, text_requests(), replace(LONG, max_tokens=20))

    assert {key: response.token_ids for key, response in again.items()} == {
        key: response.token_ids for key, response in first.items()
    }
    assert first["prompt 0", 0].token_ids != other["prompt 0", 0].token_ids


def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(qwen2):
    engine, model = qwen2
    engine.sync_weights(hub_tensors(model))
    before = text_references([load_copy(model)], text_requests(), 0.8)
    sampling = ContinuedSampling(engine)
    begun = interrupted_after_a_token(sampling, lambda begun: sampling.submit(text_requests(), LONG, begun))
    change_weights(model, seed=2)

    with sampling.interrupted(version=1):
        engine.sync_weights(hub_tensors(model))
        engine.wake()
    sampling.submit(text_requests(), LONG, begun)
    found = finish(sampling)

    assert len(found) == 6
    assert all(set(response.versions) == {0, 1} for response in found.values())
    references = [*before, *text_references([model], text_requests(), 0.8)]
    assert largest_difference_by_version(found, references) < 1e-5


def load_copy(model):
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def test_a_mixture_has_its_tied_head_and_its_routes_after_an_interruption(mixture):
    engine, model = mixture
    change_weights(model, seed=3)
    assert model.config.tie_word_embeddings
    engine.sync_weights(named for named in hub_tensors(model) if named[0] != "lm_head.weight")
    sampling, choices = ContinuedSampling(engine), ExpertChoices(model)
    options = replace(LONG, temperature=1.0)
    begun = interrupted_after_a_token(
        sampling, lambda begun: sampling.submit(text_requests(), options, begun)
    )

    sampling.submit(text_requests(), options, begun)
    found = finish(sampling)

    assert {response.finish_reason for its in begun.values() for response in its.values()} == {INTERRUPTED}
    assert largest_difference(model, text_requests(), found) < 1e-5
    prompts = {request.uid: request.prompt_token_ids for request in text_requests()}
    for response in found.values():
        ids = torch.tensor([[*prompts[response.uid], *response.token_ids]])
        with torch.no_grad(), choices.running(ChoicePass(records=True)) as passed:
            model(ids)
        assert torch.equal(response.routes.sort(-1).values, passed.routes()[:-1].sort(-1).values)


def scheduler_of(engine):
    below = psutil.Process(engine.process.child.pid).children(recursive=True)
    [found] = [process for process in below if "scheduler" in " ".join(process.cmdline())]
    return found


def kill_scheduler(engine):
    os.kill(scheduler_of(engine).pid, signal.SIGKILL)


def during_sampling(engine, model):
    engine.submit(text_requests(), LONG)
    kill_scheduler(engine)
    while True:
        engine.step()


def during_a_sync(engine, model):
    def tensors():
        for number, named in enumerate(hub_tensors(model)):
            if number == 3:
                kill_scheduler(engine)
            yield named

    engine.sync_weights(tensors())


def during_an_idle_time(engine, model):
    engine.sleep()
    kill_scheduler(engine)
    engine.wake()
    engine.sync_weights(hub_tensors(model))


def with_a_weight_left_out(engine, model):
    engine.sync_weights((name, tensor) for name, tensor in hub_tensors(model) if "layers.1.mlp" not in name)


@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        (during_sampling, SGLangDiedError, "scheduler_0 ended with exit code -9"),
        (during_a_sync, SGLangDiedError, "scheduler_0 ended with exit code -9"),
        (during_an_idle_time, SGLangDiedError, "scheduler_0 ended with exit code -9"),
        (with_a_weight_left_out, SGLangFailedError, r"did not reach parameters .*layers\.1\.mlp"),
    ],
)
def test_an_engine_that_ends_says_why_and_leaves_no_process(tmp_path, what, error, reason):
    engine, model = start(tmp_path)
    engine.sync_weights(hub_tensors(model))
    processes = [psutil.Process(engine.process.child.pid)]
    processes += processes[0].children(recursive=True)

    with pytest.raises(error, match=reason):
        what(engine, model)
    with pytest.raises(error):  # who cleans up afterwards gets the same kind of end
        engine.process.abort([])

    engine.close()
    assert not [process for process in processes if process.is_running() and process.status() != "zombie"]


def test_a_model_that_sglang_does_not_know_is_named_with_other_engines(tmp_path):
    with pytest.raises(SGLangFailedError, match="has no SGlang implementation") as failed:
        start(tmp_path, "minicpmv4_7")

    assert f"SGLang did not start with the model {tmp_path}: if it does not know" in str(failed.value)
