# SPDX-License-Identifier: Apache-2.0
"""Prompts that are stopped after their first responses: real reward processes, scripted responses."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.trainer.rollouts.sampling import Engine, make_collector, make_config, numbers_of
from verl.config.algorithm import EarlyStopConfig
from verl.config.worker import RewardConfig
from verl.protocol import DataProto
from verl.rewards.manager import NoRewardFunction, RewardManager
from verl.trainer.rollouts.group_filter import (
    EarlyStop,
    EqualScoresFilter,
    MeanScoreFilter,
    StopCounts,
    check_scored_alone,
)
from verl.trainer.rollouts.scores import ScoredGroups

EARLY, LATE = [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]  # differ within the first two, and after them
EASY = [1.0] * 4
FILTERING = {"online_filtering": True}


def stopping(keep_probability, after=2, **algorithm):
    early_stop = EarlyStopConfig(after=after, keep_probability=keep_probability)
    return FILTERING | {"early_stop": early_stop} | algorithm


def stop(keep_probability, group_filter=None):
    return EarlyStop(2, keep_probability, group_filter or MeanScoreFilter("overall", 0.01, 0.99), seed=1)


def group_weights(batch):
    return batch.batch["sequence_weights"].view(-1, 4)


@pytest.mark.parametrize("group_filter", [None, EqualScoresFilter("overall")])
def test_a_group_that_the_filter_would_keep_by_its_first_responses_is_never_stopped(group_filter):
    scores = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]).repeat(200, 1)

    is_stopped, weights = stop(0.25, group_filter).decide(scores, range(600))

    assert not is_stopped[::3].any()
    assert weights.tolist() == [1.0, 4.0, 4.0] * 200
    # 400 groups that are sampled on with a probability of 0.25: four deviations are 35
    assert abs((~is_stopped).sum() - 200 - 100) < 35


def test_a_group_weighs_in_expectation_what_it_weighs_without_the_stop():
    patterns = torch.tensor(list(product([0.0, 1.0], repeat=4)))  # of the scores of four responses
    num_draws = 4000
    uids = [[(draw, row) for row in range(16)] for draw in range(num_draws)]
    decisions = [stop(0.4).decide(patterns[:, :2], each) for each in uids]

    weight = sum(weights * ~is_stopped for is_stopped, weights in decisions) / num_draws  # (16,)

    # the deviation of a weight of 2.5 that is drawn with a probability of 0.4, times four
    torch.testing.assert_close(weight, torch.ones(16), rtol=0, atol=4 * (1.5 / num_draws) ** 0.5)


def test_decisions_follow_from_the_seed_and_the_prompt_alone():
    scores = torch.ones(50, 2)
    whole = stop(0.5).decide(scores, range(50)).is_stopped

    assert torch.equal(stop(0.5).decide(scores[20:], range(20, 50)).is_stopped, whole[20:])
    assert not torch.equal(replace(stop(0.5), seed=2).decide(scores, range(50)).is_stopped, whole)


def test_weighted_groups_are_those_that_a_filter_alone_would_train_on(reward_manager):
    # Half of the groups look alike at first, and three of four of these are stopped.
    config = make_config(prompts=300, n=4, call=100, algorithm=stopping(0.25))
    engine = Engine(lambda number: LATE if number % 2 else EARLY)

    batch = make_collector(config, engine, reward_manager).collect(1).batch

    weights = group_weights(batch)[:, 0]
    is_late = torch.tensor([number % 2 == 1 for number in numbers_of(batch)])
    assert weights[is_late].eq(4).all() and weights[~is_late].eq(1).all()
    assert 0.1 < is_late.float().mean() < 0.3
    assert 0.37 < weights[is_late].sum() / weights.sum() < 0.63  # four deviations


def test_a_probability_of_one_samples_and_trains_on_what_a_filter_alone_does(reward_manager):
    def collected(algorithm):
        engine = Engine(lambda number: [LATE, EARLY, EASY][number % 3])
        collector = make_collector(make_config(prompts=4, n=4, algorithm=algorithm), engine, reward_manager)
        return [collector.collect(step) for step in (1, 2)]

    for in_parts, at_once in zip(collected(stopping(1.0)), collected(FILTERING), strict=True):
        assert group_weights(in_parts.batch).eq(1).all()
        for key, expected in at_once.batch.batch.items():
            assert torch.equal(in_parts.batch.batch[key], expected), key
        assert in_parts.scoring.result() == at_once.scoring.result()
        assert in_parts.metrics.items() >= at_once.metrics.items()


def test_a_stopped_prompt_is_not_sampled_on_and_is_counted(reward_manager):
    config = make_config(prompts=4, n=4, algorithm=stopping(0.01))
    engine = Engine(lambda number: EARLY if number % 2 else EASY)

    collected = make_collector(config, engine, reward_manager).collect(1)

    assert numbers_of(collected.batch) == [1, 3, 5, 7]
    sampled = [(numbers, options.n, options.first_sample) for numbers, options in engine.calls]
    assert sampled == [([0, 1, 2, 3], 2, 0), ([1, 3], 2, 2), ([4, 5, 6, 7], 2, 0), ([5, 7], 2, 2)]
    expected = {
        "filter/sampled": 8.0, "filter/kept": 4.0, "filter/too_high": 4.0, "filter/all_equal": 4.0,
        "early_stop/stopped": 4.0, "early_stop/spared": 0.0, "early_stop/saved_responses": 0.25,
        "early_stop/effective_groups": 4.0, "early_stop/gain": 1 / 0.75,
    }  # fmt: skip
    assert collected.metrics.items() >= expected.items()
    collected.batch.check()


def test_the_gain_compares_effective_groups_with_the_responses_that_they_cost():
    weights = torch.tensor([1.0, 1.0, 1.0, 4.0]).repeat_interleave(2)
    trained = ScoredGroups(DataProto.from_dict({"sequence_weights": weights}), {"overall": [0.0] * 8}, 2)
    counts = StopCounts(num_stopped=3, num_spared=1, num_saved=24, num_planned=80)

    metrics = counts.metrics(trained)

    # Four groups that stand for seven, with the variance of 49 / 19, for 56 of 80 responses.
    assert metrics["early_stop/effective_groups"] == pytest.approx(49 / 19)
    assert metrics["early_stop/gain"] == pytest.approx(49 / 19 / 7 * 80 / 56)


def test_a_call_in_which_every_prompt_is_stopped_is_not_an_error(reward_manager):
    config = make_config(prompts=2, n=4, algorithm=stopping(0.01))
    engine = Engine(lambda number: EARLY if number > 3 else EASY)

    collected = make_collector(config, engine, reward_manager).collect(1)

    assert numbers_of(collected.batch) == [4, 5]
    assert collected.metrics["filter/tries"] == 3.0


def test_weights_are_carried_with_their_groups_and_through_a_checkpoint(reward_manager, tmp_path):
    config = make_config(prompts=4, n=4, call=8, algorithm=stopping(0.5, adv_estimator="remax"))

    def make():
        return make_collector(config, Engine(lambda number: LATE, greedy_score=0.7), reward_manager)

    collector, resumed = make(), make()
    collector.collect(1)
    assert collector.num_carried
    collector.save_carried(tmp_path / "carried.pt")
    resumed.load_carried(tmp_path / "carried.pt", collector.num_carried)
    carried = resumed.carried.sequences

    assert group_weights(carried).eq(2).all()
    torch.testing.assert_close(carried.batch["reward_baselines"], torch.full((len(carried),), 0.7))
    other = make_collector(
        make_config(prompts=4, n=4, algorithm=FILTERING), Engine(lambda _: LATE), reward_manager
    )
    with pytest.raises(ValueError, match=r"`?algorithm.early_stop.after.*\(True, False\)"):
        other.load_carried(tmp_path / "carried.pt", collector.num_carried)


@pytest.mark.parametrize(
    ("reward_type", "batch_size", "is_refused"),
    [("sequential", -1, False), ("batch", -1, True), ("batch", 4, False), ("dataproto", -1, True)],
)
def test_a_reward_function_that_may_compare_responses_is_refused(
    tmp_path, reward_type, batch_size, is_refused
):
    file = tmp_path / "reward.py"
    file.write_text(f"REWARD_TYPE = {reward_type!r}\ndef main(row): ...\n")
    options = EarlyStopConfig(after=2)
    with RewardManager(RewardConfig(reward_function=str(file), batch_size=batch_size)) as manager:
        check_scored_alone(EarlyStopConfig(), manager, batch_size)
        if not is_refused:
            check_scored_alone(options, manager, batch_size)
            return
        message = rf"`algorithm.early_stop.after` \(2\).*{reward_type!r}.*sequential"
        with pytest.raises(ValueError, match=message):
            check_scored_alone(options, manager, batch_size)


def test_rewards_of_turns_are_those_of_each_response_alone():
    check_scored_alone(EarlyStopConfig(after=2), NoRewardFunction(), -1)
