# SPDX-License-Identifier: Apache-2.0
"""Rewards of turns on tokens: each on its turn's last token that counts."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.trainer.rollouts.sampling import make_config
from verl.protocol import DataProto, objects
from verl.trainer.rollouts import scores
from verl.trainer.rollouts.scores import ScoredGroups, Scoring, on_tokens, reward_values
from verl.trainer.validation import ScoredResponses, as_finished, means_of

NAN = math.nan
# Turns of tokens 0-1 and 4; of 0, 2 and 4-5; one turn of 0-1. The rest are observations and padding.
MASK = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0]])
RESPONSES = torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6, [1, 1, 0, 0, 0, 0]])
SPANS = [[(0, 2), (4, 5)], [(0, 1), (2, 3), (4, 6)], [(0, 2)]]
TURNS = [[{"start": start, "stop": stop} for start, stop in row] for row in SPANS]
VALUES = {
    "overall": [3.0, -1.0, 4.0],  # the last one is a number for the whole response
    "overall/turn_1": [1.0, 0.5, NAN],
    "overall/turn_2": [2.0, -2.0, NAN],
    "overall/turn_3": [NAN, 0.5, NAN],
}


def make_batch(mask=MASK, turns=TURNS):
    return DataProto.from_dict({"response_mask": RESPONSES, "loss_mask": mask}, {"turns": objects(turns)})


def score(config, values=VALUES, **tensors):
    return scores.score(make_batch().merge(tensors), values, config.worker, config.algorithm)


def test_the_reward_of_a_turn_is_on_its_last_token():
    scored, metrics = score(make_config())

    assert scored.batch["token_level_scores"].tolist() == [
        [0, 1.0, 0, 0, 2.0, 0], [0.5, 0, -2.0, 0, 0, 0.5], [0, 4.0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert metrics == {"reward/overall": 2.0, "reward/failures": 0.0, "reward/retries": 0.0}
    assert scored.non_tensor_batch["reward_values"].tolist() == [
        {"overall": 3.0, "overall/turn_1": 1.0, "overall/turn_2": 2.0},
        {"overall": -1.0, "overall/turn_1": 0.5, "overall/turn_2": -2.0, "overall/turn_3": 0.5},
        {"overall": 4.0},
    ]


def test_penalty_and_reward_model_are_on_the_last_token_of_the_response():
    config = make_config(reward={"overlong_buffer_length": 2, "overlong_penalty_factor": 0.5})
    reward_model = replace(config.worker.reward_model, coef=0.5)
    config = replace(config, worker=replace(config.worker, reward_model=reward_model))

    scored, _ = score(config, reward_model_scores=torch.tensor([2.0, 0.0, -4.0]))

    # The penalty is -0.25 for 5 tokens and -0.5 for 6; half the model's score is 1, 0 and -2.
    assert scored.batch["token_level_scores"].tolist() == [
        [0, 1.0, 0, 0, 2.75, 0], [0.5, 0, -2.0, 0, 0, 0.0], [0, 2.0, 0, 0, 0, 0],
    ]  # fmt: skip


def test_a_response_whose_call_failed_has_no_reward_on_any_turn():
    failed = {name: [NAN, *column[1:]] for name, column in VALUES.items()}

    scored, _ = score(make_config(), failed)

    assert not scored.batch["loss_mask"][0].any() and not scored.batch["token_level_scores"][0].any()
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [0.0, -1.0, 4.0]


def test_a_response_that_remax_cannot_compare_has_no_reward_on_any_turn():
    scored, _ = score(make_config(), reward_baselines=torch.tensor([NAN, 1.0, 1.0]))

    assert scored.batch["token_level_scores"].sum(-1).tolist() == [0.0, -1.0, 4.0]


def test_a_turn_without_a_token_that_counts_gives_its_reward_to_the_one_before():
    mask = MASK.clone()
    mask[0, 4] = 0  # the second turn
    mask[1, 0] = 0  # the first one, which has none before it
    batch = make_batch(mask)

    found = on_tokens(batch, torch.tensor(VALUES["overall"]), VALUES)

    assert found.tolist() == [[0, 3.0, 0, 0, 0, 0], [0, 0, -1.5, 0, 0, 0.5], [0, 4.0, 0, 0, 0, 0]]


def test_a_masked_conversation_has_no_rewards():
    mask = MASK.clone()
    mask[1] = 0

    assert not on_tokens(make_batch(mask), torch.tensor(VALUES["overall"]), VALUES)[1].any()


@pytest.mark.parametrize("seed", range(3))
def test_rewards_of_random_conversations_are_where_a_loop_puts_them(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, width = 20, 40
    starts = torch.rand(rows, width, generator=generator) < 0.4
    is_observed = torch.rand(rows, width, generator=generator) < 0.3
    mask, turns, rewards = torch.zeros(rows, width, dtype=torch.int64), [], []
    expected = torch.zeros(rows, width)
    for row in range(rows):
        bounds = [0, *starts[row].nonzero().flatten().tolist(), width]
        spans = [
            (start, stop) for start, stop in pairwise(bounds) if stop > start and not is_observed[row, start]
        ]
        turns.append([{"start": start, "stop": stop} for start, stop in spans])
        rewards.append(torch.randn(len(spans), generator=generator).tolist())
        for (start, stop), reward in zip(spans, rewards[-1], strict=True):
            mask[row, start:stop] = 1
            expected[row, stop - 1] = reward
    most = max(map(len, rewards))
    values = {"overall": [math.fsum(row) for row in rewards]}
    padded = [[*row, *[NAN] * (most - len(row))] for row in rewards]
    values |= {f"overall/turn_{k + 1}": [row[k] for row in padded] for k in range(most)}
    batch = DataProto.from_dict({"loss_mask": mask}, {"turns": objects(turns)})

    found = on_tokens(batch, torch.tensor(values["overall"], dtype=torch.float64), values)

    assert most > 9  # so that names in the order of text would be wrong
    assert torch.equal(found, expected)


def test_rewards_of_turns_stay_with_their_rows_when_these_are_reordered_and_stored(tmp_path):
    sequences = make_batch()[[0, 1, 2, 0]]
    values = {name: [*column, column[0]] for name, column in VALUES.items()}
    groups = ScoredGroups(sequences, values, 2)

    groups.select(torch.tensor([1, 0])).save(tmp_path / "groups")
    loaded = ScoredGroups.load(tmp_path / "groups")
    reordered = Scoring(lambda: loaded.values).reorder([3, 2, 1, 0]).result()
    found = on_tokens(
        loaded.sequences[[3, 2, 1, 0]], torch.tensor(reordered["overall"], dtype=torch.float64), reordered
    )

    # As stored: rows 2, 0, 0, 1.
    expected = on_tokens(make_batch(), torch.tensor(VALUES["overall"]), VALUES)
    assert torch.equal(found, expected[[1, 0, 0, 2]])
    assert reward_values(reordered).tolist() == reward_values(VALUES)[[1, 0, 0, 2]].tolist()


def test_a_validation_records_rewards_by_turn_and_its_means_have_their_sum():
    batch = make_batch().merge({"prompt_mask": torch.ones(3, 2, dtype=torch.int64)})
    scored = ScoredResponses(batch, VALUES, {}, [3.0, -1.5, 4.0], {})  # the second has a penalty of 0.5

    finished = as_finished(batch, VALUES, scored.scores)

    assert finished.batch["token_level_scores"].tolist() == [
        [0, 1.0, 0, 0, 2.0, 0], [0.5, 0, -2.0, 0, 0, 0.0], [0, 4.0, 0, 0, 0, 0],
    ]  # fmt: skip
    names = {name for name in means_of(scored) if name.startswith("val/")}
    assert names == {"val/overall_reward", "val/reward_score"}
