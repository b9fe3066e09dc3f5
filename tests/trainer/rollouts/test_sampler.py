# SPDX-License-Identifier: Apache-2.0
"""Responses become sequences, in the order of their prompts."""

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.rollouts.sampling import PROMPT_LENGTH, Engine, make_config, make_sampler, numbered_prompts
from verl.agents.interface import Trajectory
from verl.config.multi_turn import MultiTurnConfig
from verl.protocol import DataProto, objects
from verl.trainer.rollouts.engines import SharedEngines
from verl.trainer.rollouts.sampler import with_uids
from verl.trainer.rollouts.sequences import draft_columns, join_responses
from verl.workers.rollout.interface import Drafts, FinishedResponse


def test_sequences_come_in_the_order_of_their_prompts_in_whatever_order_they_finish(reward_manager):
    engine = Engine(lambda number: [0.1 * number, 1.0])
    progress = []
    sampler = make_sampler(make_config(), engine, reward_manager, lambda *state: progress.append(state))

    prompts = with_uids(next(numbered_prompts(3)), "step1")
    sequences, scoring = sampler.sample(prompts, sampler.options)

    sequences.check()
    assert sequences.non_tensor_batch["uid"].tolist() == [f"step1-{k}" for k in (0, 0, 1, 1, 2, 2)]
    # The engine writes (number + sample) % 5 times the token number + 1, and then ten times the score.
    assert sequences.batch["responses"][:, :4].tolist() == [
        [0, 0, 0, 0], [1, 10, 0, 0], [2, 1, 0, 0], [2, 2, 10, 0], [3, 3, 2, 0], [3, 3, 3, 10],
    ]  # fmt: skip
    assert sequences.batch["response_mask"].sum(-1).tolist() == [1, 2, 2, 3, 3, 4]
    assert scoring.result()["overall"] == [0.0, 1.0, 0.1, 1.0, 0.2, 1.0]
    assert progress == [(done, 6, "responses") for done in range(1, 7)]


def test_who_watches_the_scores_sees_them_once_with_their_prompts(reward_manager):
    seen = []
    sampler = make_sampler(
        make_config(), Engine(lambda number: [0.1 * number, 1.0]), reward_manager,
        on_scored=lambda prompts, values: seen.append((prompts.non_tensor_batch["uid"], values["overall"])),
    )  # fmt: skip
    prompts = with_uids(next(numbered_prompts(2)), "step1")

    _, scoring = sampler.sample(prompts, sampler.options)
    assert seen == []
    values = scoring.reorder([3, 0]).result()
    scoring.result()

    greedy = sampler.sample(prompts, sampler.greedy_options)[1].result()  # as `remax` does, once for each
    assert len(greedy["overall"]) == 2
    [(uids, overall)] = seen
    assert uids.tolist() == ["step1-0", "step1-1"] and overall == [0.0, 1.0, 0.1, 1.0]
    assert values["overall"] == [1.0, 0.0]


def test_a_batch_of_validation_is_as_wide_as_its_longest_response_may_be(reward_manager):
    sampler = make_sampler(make_config(), Engine(lambda number: [1.0, 1.0]), reward_manager)
    prompts = with_uids(next(numbered_prompts(3)), "val")
    width = sampler.response_length

    longer, _ = sampler.sample(prompts, sampler.options.override({"max_tokens": width + 3}))
    shorter, _ = sampler.sample(prompts, sampler.options.override({"max_tokens": 1}))

    assert longer.batch["responses"].shape[-1] == width + 3
    assert shorter.batch["responses"].shape[-1] == width


def test_positions_continue_from_the_prompt_and_padding_is_masked():
    prompts = DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 8, 9]]),
            "prompt_mask": torch.tensor([[0, 1, 1]]),
            "prompt_position_ids": torch.tensor([[0, 0, 1]]),
        },
        {"uid": objects(["a"]), "raw_prompt_ids": objects([[8, 9]])},
    )
    response = FinishedResponse("a", 0, [5, 6], [-0.5, -0.25], "length")

    joined = join_responses(prompts, [response], n=1, response_length=3, pad_token_id=7)

    assert joined.batch["input_ids"].tolist() == [[0, 8, 9, 5, 6, 7]]
    assert joined.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0]]
    assert joined.batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4]]
    assert joined.batch["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0.0]]
    assert joined.non_tensor_batch["finish_reason"].tolist() == ["length"]
    assert joined.batch["prompts"].shape == (1, PROMPT_LENGTH)
    assert not joined.non_tensor_batch.keys() & {"raw_prompt_ids"}


def test_drafts_are_columns_also_where_an_agent_had_no_turn():
    responses = [
        FinishedResponse("a", sample, [5], [-0.5], "stop", drafts=drafts)
        for sample, drafts in enumerate([Drafts(6, 4), None])
    ]

    columns = draft_columns(responses)

    assert columns["drafted_tokens"].tolist() == [6, 0] and columns["accepted_tokens"].tolist() == [4, 0]


def test_the_greedy_response_differs_from_the_sampled_ones_only_in_how_it_is_sampled():
    sampler = make_sampler(make_config(n=5), None, None)
    sampled, greedy = sampler.options, sampler.greedy_options

    assert greedy.is_greedy and greedy.n == 1 and not sampled.is_greedy and sampled.n == 5
    assert (greedy.max_tokens, greedy.ignore_eos) == (sampled.max_tokens, sampled.ignore_eos)


@pytest.mark.parametrize(
    ("options", "encodes", "num_encoded"),
    [
        ({}, True, 3),
        ({}, False, 0),
        ({"environment": "gymnasium"}, True, 0),
        ({"agent": "verifiers"}, True, 0),
    ],
)
def test_the_policys_tower_encodes_media_of_rows_only_if_they_are_the_prompts(
    reward_manager, options, encodes, num_encoded
):
    class Encoding(Engine):
        encoded = ()

        def encodes_media(self):
            return [encodes, encodes]  # of two ranks

        def encode_media(self, prompts):
            self.encoded = prompts.non_tensor_batch["multi_modal_data"]
            return iter(())

    config, engine = make_config(), Encoding(lambda number: [0.0, 1.0])
    rollout = config.worker.rollout
    rollout = replace(rollout, multi_turn=MultiTurnConfig(enable=bool(options), **options))
    config = replace(config, worker=replace(config.worker, rollout=rollout))
    sampler = make_sampler(config, SharedEngines(engine, config.worker), reward_manager)
    media = {"multi_modal_data": objects([{"images": ["one.png"]}] * 3)}
    prompts = with_uids(next(numbered_prompts(3)), "p").merge(media, replace=media)

    sampler.sample(prompts, sampler.options)

    assert len(engine.encoded) == num_encoded


def test_a_masked_conversation_has_no_score_and_its_group_keeps_theirs(reward_manager):
    class Masking(Engine):
        def respond(self, uid, number, sample, options):
            response = super().respond(uid, number, sample, options)
            is_masked = (number, sample) in ((1, 1), (2, 0))
            conversation = Trajectory([True] * len(response.token_ids), (), (), is_masked=is_masked)
            return replace(response, trajectory=conversation)

    sampler = make_sampler(make_config(), Masking(lambda number: [0.1 * number, 1.0]), reward_manager)

    sequences, scoring = sampler.sample(with_uids(next(numbered_prompts(3)), "p"), sampler.options)
    values = scoring.result()

    assert values["overall"] == pytest.approx([0.0, 1.0, 0.1, math.nan, math.nan, 1.0], nan_ok=True)
    assert values["tokens"] == pytest.approx([1, 2, 2, math.nan, math.nan, 4], nan_ok=True)
    assert sequences.batch["loss_mask"].any(-1).tolist() == [True, True, True, False, False, True]
