# SPDX-License-Identifier: Apache-2.0
"""Requests that join and leave an engine while it steps, by all engines."""

from dataclasses import replace

import pytest
import torch

from tests.workers.rollout.reference import (
    change_weights,
    collect,
    engine_params,
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

pytestmark = pytest.mark.heavy

GREEDY = SamplingOptions(n=2, temperature=0.0, max_tokens=30, ignore_eos=True)
LATE = RolloutRequest("late", [70, 71, 72, 73])
TOO_LONG = RolloutRequest("too long", [40] * 300)


@pytest.fixture(scope="module", params=engine_params("hf", "vllm", "sglang"))
def qwen2(request, tmp_path_factory, single_process):
    path = save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    engine, model = build_rollout_engine(rollout_config(name=request.param), setup_of(path)), load_model(path)
    change_weights(model, seed=1)
    engine.sync_weights(hub_tensors(model))
    yield engine, model
    engine.close()


@pytest.fixture
def stepped(request, qwen2):
    """An engine that samples within its steps; SGLang samples in a process of its own."""
    if request.node.callspec.params["qwen2"] == "sglang":
        pytest.skip("its steps take what was sampled since")
    return qwen2


@pytest.fixture(autouse=True)
def idle(request):
    """Every test leaves an engine without requests."""
    yield
    if "qwen2" in request.fixturenames:
        engine, _ = request.getfixturevalue("qwen2")
        left = engine.num_unfinished
        engine.sleep()  # for the next test
        engine.wake()
        assert left == 0


def run_steps(engine, number):
    """The responses that some steps finish, by (uid, sample)."""
    return {(response.uid, response.sample): response for _ in range(number) for response in engine.step()}


def run_all(engine):
    """The responses of all unfinished requests, by (uid, sample), and the sizes of the steps."""
    finished = []
    while engine.num_unfinished:
        finished.append(engine.step())
    by_key = {(response.uid, response.sample): response for step in finished for response in step}
    assert len(by_key) == sum(map(len, finished))
    return by_key, [len(step) for step in finished]


def tokens_of(responses):
    return {key: response.token_ids for key, response in responses.items()}


def test_one_step_is_one_token_and_the_whole_batch_is_what_generate_yields(stepped):
    engine, _ = stepped
    expected = collect(engine, text_requests(), GREEDY)

    engine.submit(text_requests(), GREEDY)
    assert engine.num_unfinished == 6
    responses, sizes = run_all(engine)

    assert sizes == [0] * 29 + [6]
    assert tokens_of(responses) == tokens_of(expected)


def test_several_steps_end_with_the_first_that_finishes_a_response(stepped):
    engine, _ = stepped
    first, second, third = text_requests()
    requests = [replace(first, max_tokens=5), replace(second, max_tokens=7), third]
    engine.submit(requests, replace(GREEDY, n=1))

    sizes = [[response.uid for response in engine.step(at_most=4)] for _ in range(4)]

    # after 4, 5, 7 and 11 tokens
    assert sizes == [[], [first.uid], [second.uid], []]
    assert [response.uid for response in engine.step(at_most=100)] == [third.uid]


def test_requests_that_join_others_get_the_tokens_that_they_get_alone(qwen2):
    engine, model = qwen2
    requests = [*text_requests(), LATE]
    alone = {}
    for request in requests:
        alone |= tokens_of(collect(engine, [request], GREEDY))

    found = {}
    for request in requests:  # each 4 steps after the one before
        engine.submit([request], GREEDY)
        found |= run_steps(engine, 4)
    found |= run_all(engine)[0]

    assert tokens_of(found) == alone
    assert largest_difference(model, requests, found) < 1e-4


def test_requests_that_join_are_sampled_by_the_same_law(qwen2):
    engine, model = qwen2
    options = SamplingOptions(n=8, temperature=0.7, top_p=0.9, max_tokens=40)
    engine.submit(text_requests(), options)
    found = run_steps(engine, 3)
    engine.submit([LATE], replace(options, top_p=1.0, max_tokens=12))

    found |= run_all(engine)[0]

    assert len(found) == 32
    assert largest_difference(model, [*text_requests(), LATE], found, temperature=0.7) < 1e-4
    assert max(len(found["late", sample].token_ids) for sample in range(8)) <= 12


def test_aborted_requests_give_no_response_and_leave_the_others_alone(qwen2):
    engine, _ = qwen2
    first, second, third = text_requests()
    expected = tokens_of(collect(engine, [first, third], GREEDY))
    engine.submit([first, replace(second, max_tokens=200), third], GREEDY)
    found = {key: response for key, response in run_steps(engine, 7).items() if key[0] != second.uid}

    engine.abort([second.uid, "unknown"])
    assert engine.num_unfinished == 4 - len(found)
    engine.submit([replace(LATE, uid=second.uid, max_tokens=3)], GREEDY)  # the uid is free again
    found |= run_all(engine)[0]

    again = tokens_of(collect(engine, [replace(LATE, uid=second.uid, max_tokens=3)], GREEDY))
    assert tokens_of(found) == expected | again


def test_requests_that_wait_can_be_aborted(qwen2):
    engine, _ = qwen2
    engine.submit(text_requests(), GREEDY)

    engine.abort([request.uid for request in text_requests()])

    assert engine.num_unfinished == 0
    assert engine.step() == []


def test_a_request_may_have_a_limit_of_its_own(qwen2):
    engine, _ = qwen2
    limits = {"prompt 0": 3, "prompt 1": 40, "prompt 2": 30}
    requests = [
        replace(request, max_tokens=None if limits[request.uid] == 30 else limits[request.uid])
        for request in text_requests()
    ]

    responses = collect(engine, requests, GREEDY)

    found = {(uid, len(response.token_ids)) for (uid, _), response in responses.items()}
    assert found == set(limits.items())
    assert {response.finish_reason for response in responses.values()} == {"length"}
    with pytest.raises(AssertionError, match="at least one token, got a limit of 0 for late"):
        engine.submit([replace(LATE, max_tokens=0)], GREEDY)


def test_a_uid_belongs_to_one_unfinished_request(qwen2):
    engine, _ = qwen2
    with pytest.raises(AssertionError, match="uids that no unfinished request has"):
        engine.submit([LATE, LATE], GREEDY)
    engine.submit([LATE], GREEDY)

    with pytest.raises(AssertionError, match="uids that no unfinished request has"):
        engine.submit([*text_requests(), LATE], GREEDY)

    assert run_all(engine)[0].keys() == {("late", 0), ("late", 1)}
    assert collect(engine, [LATE], GREEDY).keys() == {("late", 0), ("late", 1)}


def test_a_refused_request_starts_none_of_its_batch(qwen2):
    engine, _ = qwen2
    expected = tokens_of(collect(engine, text_requests()[:1], GREEDY))
    engine.submit(text_requests()[:1], GREEDY)

    with pytest.raises(Exception, match=r"300 (input )?tokens"):
        engine.submit([LATE, TOO_LONG], GREEDY)

    assert engine.num_unfinished == 2
    assert tokens_of(run_all(engine)[0]) == expected


def test_unfinished_requests_have_one_temperature(qwen2):
    engine, model = qwen2
    options = replace(GREEDY, temperature=0.5)
    engine.submit(text_requests(), options)

    with pytest.raises(AssertionError, match=r"have temperature 0.5.*before requests at 1.0"):
        engine.submit([LATE], GREEDY)

    assert largest_difference(model, text_requests(), run_all(engine)[0], 0.5) < 1e-4
    found = collect(engine, [LATE], GREEDY)  # now it is idle
    assert largest_difference(model, [LATE], found) < 1e-4


def test_greedy_requests_join_those_of_temperature_1(qwen2):
    engine, model = qwen2
    expected = tokens_of(collect(engine, [LATE], GREEDY))
    engine.submit(text_requests(), replace(GREEDY, temperature=1.0))
    found = run_steps(engine, 1)

    engine.submit([LATE], GREEDY)
    found |= run_all(engine)[0]

    assert {key: tokens for key, tokens in tokens_of(found).items() if key in expected} == expected
    assert largest_difference(model, [*text_requests(), LATE], found) < 1e-4


def test_a_whole_batch_needs_an_idle_engine(qwen2):
    engine, _ = qwen2
    engine.submit([LATE], GREEDY)

    with pytest.raises(AssertionError, match="an idle engine, this one has 2 responses"):
        next(engine.generate(text_requests(), GREEDY))

    assert engine.num_unfinished == 2
    run_all(engine)


def test_weights_do_not_change_under_a_response_and_sleep_aborts_it(qwen2):
    engine, model = qwen2
    engine.submit(text_requests(), GREEDY)

    with pytest.raises(AssertionError, match="6 unfinished responses"):
        engine.sync_weights(hub_tensors(model))
    engine.sleep()
    assert engine.num_unfinished == 0
    engine.sync_weights(hub_tensors(model))
    engine.wake()

    assert largest_difference(model, text_requests(), collect(engine, text_requests(), GREEDY)) < 1e-4


def test_a_seed_and_an_offset_give_a_request_its_own_random_numbers(qwen2):
    engine, _ = qwen2
    options = SamplingOptions(max_tokens=40, seed=7, ignore_eos=True)
    [first, *_] = text_requests()
    turns = [replace(first, uid=turn, seed_offset=turn) for turn in range(3)]
    together = tokens_of(collect(engine, turns, options))

    engine.submit(turns[2:], options)
    apart = run_steps(engine, 5)
    engine.submit(turns[:2], options)
    apart |= run_all(engine)[0]

    assert len({tuple(tokens) for tokens in together.values()}) == 3
    assert tokens_of(apart) == together
    again = tokens_of(collect(engine, [replace(turn, seed_offset=1) for turn in turns[:1]], options))
    assert again[0, 0] == together[1, 0]


@pytest.mark.nightly
def test_random_numbers_of_training_stay_alone_between_steps(qwen2):
    engine, _ = qwen2
    before = torch.get_rng_state()
    engine.submit(text_requests(), SamplingOptions(n=2, max_tokens=6))

    while engine.num_unfinished:
        engine.step()
        assert torch.equal(torch.get_rng_state(), before)
