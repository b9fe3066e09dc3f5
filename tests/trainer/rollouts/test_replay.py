# SPDX-License-Identifier: Apache-2.0
"""Trained groups fill steps for which a filter keeps too few."""

import pytest
import torch

from tests.trainer.rollouts.sampling import Engine, make_collector, make_config, numbers_of

NARROW, WIDE, HARD = [0.4, 0.6], [0.0, 1.0], [0.0, 0.0]
LATER = 4  # prompts from here on are hard


def scores_of(number):
    """Prompt 0 is hard, 1 to 3 have two scores each: the distances are 0.2, 1 and 1."""
    return HARD if number >= LATER else [HARD, NARROW, WIDE, WIDE][number]


def replaying(reward_manager, engine, max_age=2, prompts=3, **trainer):
    algorithm = {"online_filtering": True, "replay_max_age": max_age}
    return make_collector(
        make_config(prompts=prompts, algorithm=algorithm, trainer=trainer), engine, reward_manager
    )


def after_a_step(reward_manager, engine, **options):
    """A collector whose first step trained on prompts 1, 2 and 3, in calls of 0 to 2 and 3 to 5."""
    collector = replaying(reward_manager, engine, **options)
    assert numbers_of(collector.collect(1).batch) == [1, 2, 3]
    return collector


def test_a_step_without_enough_groups_trains_on_old_ones_instead_of_sampling_again(reward_manager):
    engine = Engine(scores_of)
    collector = after_a_step(reward_manager, engine)
    calls, engine.weights = len(engine.calls), 2.0

    collected = collector.collect(2)

    assert len(engine.calls) == calls + 1
    assert numbers_of(collected.batch) == [1, 2, 3]
    assert collected.metrics["filter/replayed"] == 3 and collected.metrics["filter/kept"] == 0
    assert (
        collected.batch.batch["rollout_log_probs"][:, 0].tolist() == [-1.0] * 6
    )  # of the weights that sampled
    assert collected.batch.batch["rollout_steps"].tolist() == [1] * 6
    assert collected.scoring.result()["overall"] == [0.4, 0.6, 0.0, 1.0, 0.0, 1.0]


def test_groups_whose_scores_vary_most_come_first_and_the_newest_of_equal_ones(reward_manager):
    new = dict.fromkeys((6, 7), NARROW) | dict.fromkeys((9, 10), WIDE)
    engine = Engine(lambda number: new[number] if number in new else scores_of(number))
    collector = after_a_step(reward_manager, engine)

    second, third = collector.collect(2), collector.collect(3)  # of 6 to 8, and of 9 to 11

    assert numbers_of(second.batch) == [6, 7, 3]  # as wide as 2, and newer
    assert numbers_of(third.batch) == [9, 10, 3]
    assert [step.metrics["filter/replayed"] for step in (second, third)] == [1, 1]


def test_a_group_is_trained_on_up_to_its_age_and_then_prompts_are_sampled_again(reward_manager):
    engine = Engine(lambda number: WIDE if number >= 15 else scores_of(number))
    collector = after_a_step(reward_manager, engine, max_age=2)

    assert numbers_of(collector.collect(2).batch) == numbers_of(collector.collect(3).batch) == [1, 2, 3]
    assert collector.num_replayable == 0  # they would be three steps old
    assert numbers_of(collector.collect(4).batch) == [15, 16, 17]  # after a call with 12 to 14


def test_no_group_is_in_a_step_twice_if_there_are_too_few_of_them(reward_manager):
    engine = Engine(lambda number: WIDE if number in (6, 9, 10, 11) else scores_of(number))
    collector = replaying(reward_manager, engine, prompts=3)
    collector.collect(1)
    collector.replay.groups = collector.replay.groups.select(torch.tensor([0]))  # prompt 1

    collected = collector.collect(2)  # keeps 6 of 6 to 8, replays 1, and samples 9 to 11 for the last

    assert numbers_of(collected.batch) == [6, 1, 9]
    assert collected.metrics["filter/tries"] == 2 and collected.metrics["filter/kept"] == 4
    assert numbers_of(collector.carried.sequences) == [10, 11]


@pytest.mark.parametrize("num_carried", [0, 1])
def test_a_resumed_run_replays_and_carries_the_same_groups(reward_manager, tmp_path, num_carried):
    carrying = {4: WIDE} if num_carried else {}
    engine = Engine(lambda number: carrying[number] if number in carrying else scores_of(number))
    whole = after_a_step(reward_manager, engine)
    assert (whole.num_carried, whole.num_replayable) == (num_carried, 3)
    whole.save_carried(tmp_path / "groups.pt")

    resumed = replaying(reward_manager, engine)
    resumed.prompts = whole.prompts
    resumed.load_carried(tmp_path / "groups.pt", num_carried)
    collected = resumed.collect(2)

    assert numbers_of(collected.batch) == ([4, 2, 3] if num_carried else [1, 2, 3])
    assert resumed.num_carried == 0 and resumed.num_replayable == 3 + num_carried


@pytest.mark.parametrize(("max_age", "left"), [(1, []), (2, [2, 3, 1])])
def test_replayed_groups_that_a_step_has_no_room_for_are_replayed_later_within_their_age(
    reward_manager, max_age, left
):
    options = dict(algorithm={"replay_max_age": max_age}, trainer={"rejection_sample": True})
    collector = make_collector(make_config(mini_batch=2, **options), Engine(scores_of), reward_manager)

    assert numbers_of(collector.collect(1).batch) == [1, 2]  # two of three make a mini batch
    assert numbers_of(collector.carried.sequences) == [3]
    second = collector.collect(2)  # adds 1 and 2 to 3, and has room for two

    assert numbers_of(second.batch) == [3, 1] and second.metrics["filter/replayed"] == 1
    assert collector.num_carried == second.metrics["filter/carried_out"] == 0
    assert collector.num_replayable == len(left)
    assert not left or numbers_of(collector.replay.groups.sequences) == left


@pytest.mark.parametrize(("max_age", "num_left"), [(1, 0), (2, 3)])
def test_a_resumed_run_replays_no_group_beyond_its_own_age(reward_manager, tmp_path, max_age, num_left):
    whole = after_a_step(reward_manager, Engine(scores_of), max_age=3)
    whole.save_carried(tmp_path / "groups.pt")

    resumed = replaying(reward_manager, Engine(scores_of), max_age=max_age)
    resumed.load_carried(tmp_path / "groups.pt", 0, step=2)

    assert resumed.num_replayable == num_left


def test_without_the_option_nothing_is_kept(reward_manager):
    collector = make_collector(
        make_config(prompts=3, algorithm={"online_filtering": True}), Engine(scores_of), reward_manager
    )

    assert "filter/replayed" not in collector.collect(1).metrics
    assert collector.num_replayable == 0
