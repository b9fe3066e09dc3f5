# SPDX-License-Identifier: Apache-2.0
"""Collection of a step: real batches and reward processes, an engine with scripted responses."""

import pytest
import torch

from tests.trainer.rollouts.sampling import RESPONSE_LENGTH, Engine, make_collector, make_config, numbers_of
from verl.config.worker import RewardConfig
from verl.rewards.manager import RewardManager

MIXED, EASY, HARD = [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]
FILTERING = {"online_filtering": True}
REJECTING = {"rejection_sample": True}


def every_fourth_is_easy(number):
    return EASY if number % 4 == 0 else MIXED


def one_of_four_is_mixed(number):
    return [HARD, EASY, MIXED, EASY][number % 4]


def own_scores(batch):
    """The score of each row, read from its last token."""
    last = batch.batch["response_mask"].sum(-1, keepdim=True) - 1
    return (batch.batch["responses"].gather(1, last).squeeze(1) / 10).tolist()


def test_without_a_filter_a_step_is_one_rollout_batch_in_the_order_of_the_loader(reward_manager):
    collector = make_collector(make_config(prompts=3), Engine(every_fourth_is_easy), reward_manager)

    first, second = collector.collect(1), collector.collect(2)

    assert numbers_of(first.batch) == [0, 1, 2] and numbers_of(second.batch) == [3, 4, 5]
    assert len(first.batch) == 6 and first.metrics == {}
    assert first.batch.batch["row_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert first.scoring.result()["overall"] == own_scores(first.batch) == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert collector.num_carried == 0


def test_scores_are_not_waited_for_when_nothing_is_filtered(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os, time\n"
        "def main(inputs):\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "        time.sleep(0.01)\n"
        "    return [{'overall': 1.0} for _ in inputs]\n"
    )
    with RewardManager(RewardConfig(reward_function=str(reward), timeout_s=20.0)) as manager:
        collector = make_collector(make_config(prompts=2), Engine(every_fourth_is_easy), manager)

        collected = collector.collect(1)  # the function does not return before the next line
        (tmp_path / "go").touch()

        assert collected.scoring.result() == {"overall": [1.0] * 4}


def test_a_step_of_several_calls_numbers_its_prompts_and_rows_once(reward_manager):
    engine = Engine(every_fourth_is_easy)
    collector = make_collector(make_config(prompts=4, call=2), engine, reward_manager)

    batch = collector.collect(7).batch

    assert [numbers for numbers, _ in engine.calls] == [[0, 1], [2, 3]]
    assert len(set(batch.non_tensor_batch["uid"])) == 4
    assert batch.batch["row_ids"].tolist() == list(range(8))
    uids = batch.non_tensor_batch["uid"].tolist()
    assert uids[0::2] == uids[1::2]


def test_surplus_groups_are_carried_to_the_next_step_and_trained_on_first(reward_manager):
    engine = Engine(every_fourth_is_easy)
    collector = make_collector(make_config(algorithm=FILTERING), engine, reward_manager)

    # Calls 0-3 and 4-7 keep 1, 2, 3 and 5, 6, 7; the next step needs two more, of 8-11.
    first = collector.collect(1)
    engine.weights = 2.0
    second = collector.collect(2)

    assert numbers_of(first.batch) == [1, 2, 3, 5] and numbers_of(second.batch) == [6, 7, 9, 10]
    assert numbers_of(collector.carried.sequences) == [11]
    assert first.metrics == {
        "filter/tries": 2.0, "filter/sampled": 8.0, "filter/kept": 6.0, "filter/trained": 4.0,
        "filter/carried_in": 0.0, "filter/carried_out": 2.0,
        "filter/too_low": 0.0, "filter/too_high": 2.0, "filter/all_equal": 2.0,
    }  # fmt: skip
    assert second.metrics["filter/tries"] == 1.0 and second.metrics["filter/carried_in"] == 2.0
    assert second.batch.batch["row_ids"].tolist() == list(range(8))
    # Carried responses keep the log-probs of the weights that sampled them.
    assert second.batch.batch["rollout_log_probs"][:, 0].tolist() == [-1.0] * 4 + [-2.0] * 4
    for collected in (first, second):
        assert collected.scoring.result()["overall"] == own_scores(collected.batch)


def test_no_group_is_lost_or_trained_on_twice(reward_manager):
    collector = make_collector(
        make_config(prompts=4, algorithm=FILTERING), Engine(every_fourth_is_easy), reward_manager
    )

    trained = [number for step in range(1, 8) for number in numbers_of(collector.collect(step).batch)]

    assert trained == [number for number in range(100) if number % 4][:28]


def test_a_call_that_keeps_nothing_is_not_an_error(reward_manager):
    engine = Engine(lambda number: MIXED if number >= 8 else EASY)
    collected = make_collector(make_config(algorithm=FILTERING), engine, reward_manager).collect(1)

    assert numbers_of(collected.batch) == [8, 9, 10, 11]
    assert collected.metrics["filter/tries"] == 3.0


def test_a_step_that_cannot_be_filled_says_how_many_groups_there_were_and_what_to_change(reward_manager):
    config = make_config(algorithm=FILTERING, trainer={"max_try_make_batch": 3})
    collector = make_collector(config, Engine(one_of_four_is_mixed), reward_manager)

    message = (
        r"a step needs 4 groups, got 3 in 3 calls .*`trainer.max_try_make_batch`.* 12 were sampled and 3"
        r" kept, 0 came from earlier steps, 3 too hard .* 6 too easy .* 9 with equal scores: .* harder"
    )
    with pytest.raises(RuntimeError, match=message):
        collector.collect(1)


def test_zero_tries_are_without_limit(reward_manager):
    config = make_config(prompts=2, algorithm=FILTERING, trainer={"max_try_make_batch": 0})
    engine = Engine(lambda number: MIXED if number >= 60 else HARD)

    assert numbers_of(make_collector(config, engine, reward_manager).collect(1).batch) == [60, 61]


def test_the_filter_reads_the_value_of_its_key(reward_manager):
    # `accuracy` is one from a score of 1 on, so these groups have a mean overall of 0.9 and accuracy of 0.
    engine = Engine(lambda number: [0.9, 0.9] if number < 4 else MIXED)
    config = make_config(algorithm=FILTERING | {"filter_key": "accuracy"})

    assert numbers_of(make_collector(config, engine, reward_manager).collect(1).batch) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "acc",
            r"filter_key` must name .* got 'acc': it returns \['accuracy', 'overall', 'rare', 'tokens'\]",
        ),
        ("rare", r"filter_key` names 'rare'.* missing for 4 of 8"),
    ],
)
def test_a_filter_key_without_scores_is_an_error_with_the_keys_there_are(key, message, reward_manager):
    config = make_config(algorithm=FILTERING | {"filter_key": key})

    with pytest.raises(ValueError, match=message):
        make_collector(config, Engine(lambda number: MIXED), reward_manager).collect(1)


def test_rejection_trains_on_the_whole_mini_batches_that_are_left_and_carries_the_rest(reward_manager):
    config = make_config(prompts=4, mini_batch=2, trainer=REJECTING)
    engine = Engine(every_fourth_is_easy)
    collector = make_collector(config, engine, reward_manager)

    first, second = collector.collect(1), collector.collect(2)

    # Of 0-3 three are informative: one mini batch of two. With 3 carried, 4-7 add three: two mini batches.
    assert numbers_of(first.batch) == [1, 2] and numbers_of(second.batch) == [3, 5, 6, 7]
    assert len(engine.calls) == 2 and collector.num_carried == 0
    assert first.metrics["filter/trained"] == 2.0 and first.metrics["filter/carried_out"] == 1.0
    assert first.metrics["batch/solve_all_before_rs"] == 1.0 and first.metrics["batch/solve_all"] == 0.0
    assert first.metrics["batch/without_adv_ratio_before_rs"] == 0.25


def test_rejection_samples_on_only_while_there_is_not_one_mini_batch(reward_manager):
    config = make_config(prompts=4, mini_batch=2, trainer=REJECTING)
    engine = Engine(one_of_four_is_mixed)
    collector = make_collector(config, engine, reward_manager)

    assert numbers_of(collector.collect(1).batch) == [2, 6]
    assert len(engine.calls) == 2


def test_rejection_without_one_mini_batch_in_its_calls_is_an_error(reward_manager):
    config = make_config(prompts=4, mini_batch=4, trainer=REJECTING | {"max_try_make_batch": 2})
    collector = make_collector(config, Engine(one_of_four_is_mixed), reward_manager)

    message = r"needs 4 groups, got 2 in 2 calls .*2 solved by no response .* 4 by all .* 6 with equal scores"
    with pytest.raises(RuntimeError, match=message):
        collector.collect(1)


def test_the_multiplier_samples_more_prompts_in_one_call_for_those_that_are_missing(reward_manager):
    options = REJECTING | {"rejection_sample_multiplier": 3}
    engine = Engine(every_fourth_is_easy)
    collector = make_collector(make_config(prompts=4, trainer=options), engine, reward_manager)

    first, second = collector.collect(1), collector.collect(2)

    # 3 x 4 prompts give nine groups, so step 2 has its four already; a later one samples only what it misses.
    assert [numbers for numbers, _ in engine.calls] == [list(range(12))]
    assert numbers_of(first.batch) == [1, 2, 3, 5] and numbers_of(second.batch) == [6, 7, 9, 10]
    assert second.metrics["filter/tries"] == 0.0 and second.metrics["batch/solve_none_before_rs"] == 0.0
    collector.collect(3)
    # One group is carried, so 3 x 3 prompts are wanted: three batches of the loader.
    assert engine.calls[1][0] == list(range(12, 24))


def test_small_calls_stop_when_the_step_is_full(reward_manager):
    options = REJECTING | {"rejection_sample_multiplier": 3}
    engine = Engine(every_fourth_is_easy)
    collector = make_collector(make_config(prompts=4, call=2, trainer=options), engine, reward_manager)

    assert numbers_of(collector.collect(1).batch) == [1, 2, 3, 5]
    assert [numbers for numbers, _ in engine.calls] == [[0, 1], [2, 3], [4, 5]]


def test_remax_compares_each_response_with_the_greedy_one_to_its_prompt(reward_manager):
    engine = Engine(every_fourth_is_easy, greedy_score=0.7)
    config = make_config(prompts=3, algorithm={"adv_estimator": "remax"})

    collected = make_collector(config, engine, reward_manager).collect(1)

    collected.batch.check()
    baselines = collected.batch.batch["reward_baselines"]
    assert baselines.dtype == torch.float32 and baselines.shape == (6,)
    torch.testing.assert_close(baselines, torch.full((6,), 0.7))
    assert collected.metrics["reward/baseline"] == pytest.approx(0.7)
    greedy, sampled = (options for _, options in engine.calls)
    assert (greedy.n, greedy.is_greedy, greedy.max_tokens) == (1, True, RESPONSE_LENGTH)
    assert (sampled.n, sampled.is_greedy) == (2, False)


def test_the_greedy_response_has_the_overlong_penalty_of_the_others(reward_manager):
    # The greedy response to prompt k has k % 5 + 1 tokens: 4 and 5 of 6; the buffer begins at 3.
    engine = Engine(every_fourth_is_easy, greedy_score=0.7)
    config = make_config(
        prompts=5, algorithm={"adv_estimator": "remax"}, reward={"overlong_buffer_length": 3}
    )

    baselines = make_collector(config, engine, reward_manager).collect(1).batch.batch["reward_baselines"]

    expected = [0.7, 0.7, 0.7, 0.7 - 1 / 3, 0.7 - 2 / 3]
    torch.testing.assert_close(baselines, torch.tensor(expected).repeat_interleave(2))


def test_baselines_stay_with_their_groups_through_filter_and_carrying(reward_manager):
    engine = Engine(every_fourth_is_easy, greedy_score=0.7)
    config = make_config(algorithm=FILTERING | {"adv_estimator": "remax"})
    collector = make_collector(config, engine, reward_manager)

    collector.collect(1)
    engine.greedy_score = 0.3
    second = collector.collect(2)

    torch.testing.assert_close(second.batch.batch["reward_baselines"], torch.tensor([0.7] * 4 + [0.3] * 4))
