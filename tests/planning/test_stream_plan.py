# SPDX-License-Identifier: Apache-2.0
"""The plan of a stream keeps its bound and loses nothing, whatever the order of events."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.planning.stream_plan import GroupId, StreamPlan, fitting_groups


def begin_all(plan, engine=0):
    return [plan.begin(engine) for _ in range(plan.room(engine))]


def test_the_worked_example_of_the_module_is_what_the_plan_does():
    plan = StreamPlan(groups_per_step=2, max_staleness=1, last_step=10, num_engines=1)
    assert plan.room(0) == 4
    a, b, c, d = (plan.begin(0) for _ in range(4))
    plan.finish(c)
    assert not plan.is_ready
    plan.finish(a)
    assert plan.next_groups() == [a, c]
    plan.publish(1)
    plan.load(0)
    assert plan.room(0) == 2
    e, _ = plan.begin(0), plan.begin(0)

    plan.finish(e)
    plan.finish(d)
    assert not plan.is_ready  # b would be left for step 3, with a staleness of 2
    plan.finish(b)

    assert plan.next_groups() == [b, d]


def test_without_staleness_each_step_is_sampled_with_its_weights():
    plan = StreamPlan(groups_per_step=2, max_staleness=0, last_step=2, num_engines=1)

    first = begin_all(plan)
    for group in first:
        plan.finish(group)
    taken = plan.next_groups()
    before = plan.room(0)
    plan.publish(1)
    plan.load(0)
    second = begin_all(plan)

    assert first == taken == [GroupId(0, 0), GroupId(0, 1)]
    assert before == 0
    assert second == [GroupId(1, 2), GroupId(1, 3)]


def test_a_step_takes_what_is_finished_and_the_next_waits_for_what_becomes_too_old():
    plan = StreamPlan(groups_per_step=2, max_staleness=1, last_step=9, num_engines=1)
    a, b, c, d = begin_all(plan)
    plan.finish(c)
    plan.finish(d)

    assert plan.next_groups() == [c, d]  # a and b may still be trained in step 2
    plan.publish(1)
    plan.load(0)
    e, f = begin_all(plan)
    plan.finish(e)
    plan.finish(f)
    assert not plan.is_ready
    plan.finish(a)
    plan.finish(b)
    assert plan.next_groups() == [a, b]
    plan.publish(2)
    assert plan.next_groups() == [e, f]


def test_an_engine_with_old_weights_begins_nothing_that_is_too_old_when_it_is_trained():
    plan = StreamPlan(groups_per_step=2, max_staleness=1, last_step=9, num_engines=2, max_in_flight=4)
    for group in begin_all(plan, engine=0):
        plan.finish(group)
    plan.next_groups()
    plan.publish(1)

    assert plan.room(1) == 0  # of version 0 the next step has enough
    plan.load(1)
    assert plan.room(1) == 2


def test_nothing_is_begun_that_no_step_needs():
    plan = StreamPlan(groups_per_step=2, max_staleness=5, last_step=2, num_engines=1)

    assert len(begin_all(plan)) == 4


def test_a_group_that_a_filter_leaves_out_is_replaced():
    plan = StreamPlan(groups_per_step=2, max_staleness=0, last_step=1, num_engines=1)
    one, _ = begin_all(plan)

    plan.finish(one, is_kept=False)

    assert plan.room(0) == 1


def test_the_groups_of_an_engine_that_leaves_are_continued_by_others_oldest_first():
    plan = StreamPlan(groups_per_step=2, max_staleness=1, last_step=9, num_engines=2)
    a, b, c, d = begin_all(plan, engine=0) + begin_all(plan, engine=1)
    plan.score(a)  # all its responses are there

    plan.leave(0)

    assert plan.room(1) == 0  # the groups of the bound have all begun
    assert plan.adopt(1, at_most=0) == 0
    assert plan.adopt(1, at_most=5) == 1
    assert plan.in_flight == {a: None, b: 1, c: 1, d: 1}
    assert not plan.orphans


def test_an_engine_that_joins_has_its_share_once_it_has_weights():
    plan = StreamPlan(groups_per_step=4, max_staleness=1, last_step=9, num_engines=1)
    for group in begin_all(plan)[:4]:
        plan.finish(group)
    plan.next_groups()
    plan.publish(1)
    plan.load(0)

    plan.join(7)
    without_weights = plan.room(7), plan.is_outdated(7)
    plan.load(7)

    assert without_weights == (0, True)
    assert (plan.limit, plan.room(0), plan.room(7)) == (4, 0, 4)  # four of the eight are being sampled by 0


@settings(max_examples=300, deadline=None)
@given(
    groups=st.integers(1, 5),
    staleness=st.integers(0, 4),
    engines=st.integers(1, 4),
    limit=st.none() | st.integers(1, 6),
    kept=st.floats(0.3, 1.0),
    moves=st.sampled_from([0.0, 0.1, 0.5]),  # chance that engines come or go, at each event
    seed=st.integers(0, 2**32),
)
def test_no_order_of_events_stops_the_stream_or_breaks_its_bound(
    groups, staleness, engines, limit, kept, moves, seed
):
    chance, steps, places = random.Random(seed), 8, 5
    plan = StreamPlan(groups, staleness, steps, engines, limit)
    trained, filtered = [], set()
    weights = 0  # versions that training has made, of which the engines need not know

    while plan.steps < steps:
        if chance.random() < moves:
            place = chance.randrange(places)
            if place not in plan.loaded:
                plan.join(place)
            elif len(plan.loaded) > 1:
                plan.leave(place)
        events = []  # all that may happen now
        for engine in plan.loaded:
            if plan.room(engine):
                events.append(("begin", engine))
            if plan.is_outdated(engine):
                events.append(("load", engine))
            elif plan.orphans and plan.num_sampling(engine) < plan.limit:
                events.append(("adopt", engine))
        events += [("score", group) for group, owner in plan.in_flight.items() if owner is not None]
        events += [("finish", group) for group in plan.in_flight]
        if plan.version < weights:
            events.append(("publish", weights))
        elif plan.version == plan.steps:  # the step before has ended
            events.append(("take", None))
        if plan.steps > weights:
            events.append(("train", None))
        useful = [event for event in events if event[0] != "take"]
        event, value = chance.choice(events)
        if event == "begin":
            plan.begin(value)
        elif event == "load":
            plan.load(value)
        elif event == "adopt":
            assert 1 <= plan.adopt(value, at_most=2) <= 2
        elif event == "finish":
            is_kept = chance.random() < kept
            plan.finish(value, is_kept=is_kept)
            if not is_kept:
                filtered.add(value)
        elif event == "score":
            plan.score(value)
        elif event == "publish":
            plan.publish(value)
        elif event == "train":
            weights += 1
        else:
            assert plan.is_ready or useful, "nothing can happen any more"
            if plan.is_ready:
                taken = plan.next_groups()
                assert len(taken) == groups
                assert all(0 <= plan.steps - 1 - group.version <= staleness for group in taken)
                trained += taken
        assert plan.drop_late() == []  # only a lower bound than before drops any

    assert len(trained) == len(set(trained)) == groups * steps
    assert filtered.isdisjoint(trained)
    if kept == 1.0:
        assert plan.num_begun == groups * steps
        assert not plan.in_flight and not plan.orphans and not plan.finished


@pytest.mark.parametrize("limit", [None, 3])
def test_engines_share_the_groups_of_the_bound_unless_a_limit_is_given(limit):
    plan = StreamPlan(groups_per_step=4, max_staleness=1, last_step=9, num_engines=2, max_in_flight=limit)

    assert [plan.room(0), plan.room(1)] == [limit or 4] * 2


@pytest.mark.parametrize(
    ("num_open", "groups"),
    [(0, 2), (1, 2), (2, 2), (3, 1), (6, 1), (7, 0), (10, 0), (14, 0)],
)
def test_an_engine_begins_the_groups_whose_responses_all_find_a_place(num_open, groups):
    assert fitting_groups(num_open, group_size=4, at_once=10) == groups


def test_an_engine_with_nothing_to_do_begins_a_group_that_is_larger_than_it_can_sample_at_once():
    assert fitting_groups(0, group_size=4, at_once=3) == 1
    assert fitting_groups(1, group_size=4, at_once=3) == 0


def test_a_lower_bound_drops_the_groups_that_no_step_can_train_in_time():
    # Saved after step 3: a and b of version 2, c of version 3, and d that an engine which is gone had begun.
    a, b, c, d = GroupId(2, 4), GroupId(2, 5), GroupId(3, 6), GroupId(2, 7)
    plan = StreamPlan(groups_per_step=2, max_staleness=0, last_step=9, num_engines=1, steps=3, version=3)
    plan.num_begun, plan.finished, plan.in_flight, plan.orphans = 8, {a, c}, {b: 0}, {d}
    assert not plan.is_ready
    assert plan.room(0) == 0

    assert plan.drop_late() == [a, b, d]
    assert plan.finished == {c}
    assert plan.room(0) == 1
    plan.finish(plan.begin(0))
    assert plan.next_groups() == [c, GroupId(3, 8)]


def test_a_lower_bound_keeps_as_many_old_groups_as_the_steps_left_for_them_take():
    old = [GroupId(2, number) for number in range(5)]
    plan = StreamPlan(groups_per_step=2, max_staleness=2, last_step=9, num_engines=1, steps=3, version=3)
    plan.finished = set(old)

    assert plan.drop_late() == old[4:]  # steps 4 and 5 take two each
    assert plan.drop_late() == []


def test_a_plan_that_can_neither_sample_nor_train_is_stuck():
    plan = StreamPlan(groups_per_step=2, max_staleness=0, last_step=9, num_engines=1, steps=3, version=3)
    assert not plan.is_stuck  # there is room
    plan.finished = {GroupId(2, 0), GroupId(2, 1)}

    assert plan.is_stuck
    plan.in_flight = {GroupId(2, 2): 0}
    assert not plan.is_stuck
