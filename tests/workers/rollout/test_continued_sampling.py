# SPDX-License-Identifier: Apache-2.0
"""Responses that continue after their engine got other weights: each token has the log-prob of its own."""

from copy import deepcopy
from dataclasses import replace

import pytest

from tests.workers.rollout.reference import (
    change_weights,
    collect,
    finish,
    hub_tensors,
    largest_difference_by_version,
    load_model,
    rollout_config,
    setup_of,
    text_references,
    text_requests,
)
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import INTERRUPTED, RolloutRequest, SamplingOptions

pytestmark = pytest.mark.heavy

OPTIONS = SamplingOptions(n=3, temperature=0.8, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine_and_models(request, tmp_path_factory, single_process):
    """An engine, and the weights of versions 0, 1 and 2."""
    path = save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    engine = build_rollout_engine(rollout_config(name=request.param), setup_of(path))
    models = [load_model(path)]
    for seed in (1, 2):
        models.append(deepcopy(models[-1]))
        change_weights(models[-1], seed)
    yield engine, models
    engine.close()


@pytest.fixture
def sampling(engine_and_models):
    engine, models = engine_and_models
    engine.sync_weights(hub_tensors(models[0]))
    engine.wake()
    return ContinuedSampling(engine)


def take_weights(sampling, models, version):
    with sampling.interrupted(version):
        sampling.engine.sync_weights(hub_tensors(models[version]))
        sampling.engine.wake()


def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(engine_and_models, sampling):
    _, models = engine_and_models
    late = RolloutRequest("late", [70, 71, 72, 73])
    requests = [replace(text_requests()[0], max_tokens=6), *text_requests()[1:], late]
    sampling.submit(requests[:3], OPTIONS)
    found = {}

    for version in (1, 2):
        for _ in range(5):
            found |= {(response.uid, response.sample): response for response in sampling.step()}
        take_weights(sampling, models, version)
        if version == 1:
            sampling.submit([late], OPTIONS)
    found |= finish(sampling)

    first = {uid: response.versions for (uid, sample), response in found.items() if sample == 0}
    assert set(first.pop("late")) == {1, 2}
    assert first == {
        "prompt 0": [0] * 5 + [1],
        "prompt 1": [0] * 5 + [1] * 5 + [2] * 14,
        "prompt 2": [0] * 5 + [1] * 5 + [2] * 14,
    }
    assert {response.finish_reason for response in found.values()} == {"length"}
    assert len(found) == 12
    assert largest_difference_by_version(found, text_references(models, requests, 0.8)) < 1e-4


def test_responses_continue_in_another_engine_after_an_interruption(engine_and_models, sampling):
    engine, models = engine_and_models
    requests = [replace(text_requests()[0], max_tokens=3), *text_requests()[1:]]
    sampling.submit(requests, OPTIONS)
    found = {(response.uid, response.sample): response for _ in range(4) for response in sampling.step()}

    begun = sampling.interrupt()
    left = engine.num_unfinished
    other = ContinuedSampling(engine)
    with other.interrupted(version=1):
        engine.sync_weights(hub_tensors(models[1]))
        engine.wake()
    by_uid = {}
    for response in begun:
        by_uid.setdefault(response.uid, {})[response.sample] = response
    other.submit([request for request in requests if request.uid in by_uid], OPTIONS, by_uid)
    found |= finish(other)

    assert left == 0
    assert {response.finish_reason for response in begun} == {INTERRUPTED}
    assert {(response.uid, len(response.token_ids)) for response in begun} == {
        ("prompt 1", 4),
        ("prompt 2", 4),
    }
    assert {tuple(found["prompt 1", sample].versions) for sample in range(3)} == {(0,) * 4 + (1,) * 20}
    assert len(found) == 9
    assert largest_difference_by_version(found, text_references(models, requests, 0.8)) < 1e-4


def test_an_interruption_before_the_first_token_changes_nothing(engine_and_models, sampling):
    engine, models = engine_and_models
    seeded = replace(OPTIONS, seed=3)
    expected = collect(engine, text_requests(), seeded)

    sampling.submit(text_requests(), seeded)
    take_weights(sampling, models, 0)
    found = finish(sampling)

    assert {key: response.token_ids for key, response in found.items()} == {
        key: response.token_ids for key, response in expected.items()
    }


def test_a_response_that_ended_before_an_interruption_is_returned_once_as_it_is(
    engine_and_models, sampling, monkeypatch
):
    engine, models = engine_and_models
    request = text_requests()[0]
    begun_of = engine._begun

    def begun():
        """As of an engine that samples while it is not stepped, and ended a response meanwhile."""
        return [
            replace(response, finish_reason=INTERRUPTED if response.sample else "stop")
            for response in begun_of()
        ]

    monkeypatch.setattr(engine, "_begun", begun)
    sampling.submit([request], OPTIONS)
    sampling.step(3)
    take_weights(sampling, models, 1)

    (ended,) = sampling.step()
    assert (ended.sample, ended.finish_reason, ended.versions) == (0, "stop", [0] * 3)
    assert sampling.num_unfinished == 2
    found = finish(sampling)
    assert {(key, len(response.versions)) for key, response in found.items()} == {
        ((request.uid, 1), 24),
        ((request.uid, 2), 24),
    }

    sampling.submit([request], OPTIONS)
    sampling.step(3)
    (ended, *others) = sampling.interrupt()
    sampling.submit([request], OPTIONS, {request.uid: {each.sample: each for each in (ended, *others)}})
    assert sampling.interrupt()[0] == ended
    assert engine.num_unfinished == 0


@pytest.mark.nightly
def test_a_seed_gives_the_same_tokens_after_the_same_interruptions(engine_and_models, sampling):
    _, models = engine_and_models
    runs = []
    for _ in range(2):
        sampling.submit(text_requests(), replace(OPTIONS, seed=3))
        sampling.step(4)
        take_weights(sampling, models, 0)
        sampling.step(4)
        take_weights(sampling, models, 0)
        runs.append({key: response.token_ids for key, response in finish(sampling).items()})

    assert runs[0] == runs[1]
    assert len({tuple(tokens[4:]) for tokens in runs[0].values()}) == 9  # a seed of its own for each
