# SPDX-License-Identifier: Apache-2.0
"""The simulation of sampling and training, against runs that are worked by hand."""

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.planning.speed.simulation import ORDERS, Costs, SimulatedWork, simulate


def work(lengths, *, groups=2, n=1, steps=2, prompt_tokens=0.0):
    return SimulatedWork(groups, n, prompt_tokens, cycle(lengths).__next__, steps)


def costs(*, decoding=lambda running: 1.0, prompt_token=0.0, training=2.0, loading=0.0, at_once=1000):
    return Costs(decoding, prompt_token, training, loading, at_once)


@pytest.mark.parametrize(
    ("mode", "seconds", "idle_sampling", "idle_training"),
    [
        # samples 0 to 3, trains to 5, samples to 8, trains to 10
        ("off", 10, 4 / 10, 6 / 10),
        # samples 0 to 3, then trains to 5 and samples to 6, then trains to 8
        ("one_step_off", 8, 2 / 8, 4 / 8),
        # begins all four; two are finished at 1 and trained until 3, when the others are
        ("stream", 5, 2 / 5, 1 / 5),
        # trains from 1 to 3, finishes the others at 5, trains until 7
        ("partial", 7, 4 / 7, 3 / 7),
    ],
)
def test_two_steps_take_as_long_as_by_hand(mode, seconds, idle_sampling, idle_training):
    run = simulate(mode, work([1, 3]), costs(), engines=1)

    assert run.seconds == pytest.approx(seconds)
    assert run.tokens == 8
    assert run.idle_sampling == pytest.approx(idle_sampling)
    assert run.idle_training == pytest.approx(idle_training)


def test_loading_and_reading_again_delay_an_engine():
    # off: reads 2 prompts of 10 tokens (2 s), samples 3, trains 2, and loads for 5 before the second step
    slow = costs(prompt_token=0.1, loading=5.0)
    assert simulate("off", work([1, 3], prompt_tokens=10), slow, engines=1).seconds == pytest.approx(19)

    # partial: reads 4 prompts (4 s), samples 1, trains 2; loads for 5, reads again 2 prompts and 2 tokens
    # (2.2 s), samples 2, trains 2
    partial = simulate("partial", work([1, 3], prompt_tokens=10), slow, engines=1)
    assert partial.seconds == pytest.approx(4 + 1 + 2 + 5 + 2.2 + 2 + 2)


def test_a_step_of_an_engine_may_take_longer_with_more_responses():
    # two at once for a token (2 s), then one for two tokens
    slow = costs(decoding=float)
    assert simulate("off", work([1, 3], steps=1), slow, engines=1).seconds == pytest.approx(2 + 2 + 2)
    assert simulate("off", work([1, 3], steps=1), slow, engines=2).seconds == pytest.approx(3 + 2)


def test_responses_beyond_those_that_run_at_once_wait_for_a_place():
    # 1, then 3 from 1 on
    narrow = costs(at_once=1)
    assert simulate("off", work([1, 3], steps=1), narrow, engines=1).seconds == pytest.approx(1 + 3 + 2)


def test_a_full_engine_begins_a_group_when_it_has_a_place_for_its_responses():
    # samples 0 to 1 and 0 to 3, 1 to 2, 2 to 5; trains from 2 to 3 and, when the last is finished, to 6
    full = simulate("stream", work([1, 3]), costs(training=1.0), engines=1, at_once=2)
    assert full.seconds == pytest.approx(6)

    # with places for all four the last is finished at 3
    assert simulate("stream", work([1, 3]), costs(training=1.0), engines=1).seconds == pytest.approx(4)


def test_the_middle_of_a_run_has_neither_its_start_nor_its_end():
    # sampling takes 2 and training 3 seconds: from the first step on, training never waits
    middle = simulate("stream", work([2], steps=4), costs(training=3.0), engines=1, warm_up=2)

    assert middle.seconds == pytest.approx(4 * 3)
    assert middle.tokens == 4 * 2 * 2
    assert middle.idle_training == 0.0


@settings(deadline=None, max_examples=60)
@given(
    mode=st.sampled_from(sorted(ORDERS)),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    engines=st.integers(1, 3),
    groups=st.integers(3, 6),
    staleness=st.integers(0, 4),
)
def test_no_mode_is_slower_than_taking_turns_or_faster_than_its_busier_half(
    mode, lengths, engines, groups, staleness
):
    same = {"engines": engines, "staleness": staleness}
    off = simulate("off", work(lengths, groups=groups, steps=5), costs(), **same)

    run = simulate(mode, work(lengths, groups=groups, steps=5), costs(), **same)

    assert run.tokens == off.tokens
    assert run.seconds <= off.seconds + 1e-6 and run.seconds >= 5 * costs().training
    assert 0 <= run.idle_sampling <= 1 and 0 <= run.idle_training <= 1


def test_a_stream_without_staleness_takes_turns():
    runs = [
        simulate(mode, work([5, 2, 9, 1], groups=4, steps=6), costs(), engines=2, staleness=0)
        for mode in ("off", "stream", "partial")
    ]

    assert runs[0].seconds == pytest.approx(runs[1].seconds) == pytest.approx(runs[2].seconds)
