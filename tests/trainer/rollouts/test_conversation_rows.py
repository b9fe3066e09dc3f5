# SPDX-License-Identifier: Apache-2.0
"""Conversations become rows: observations are masked, have positions and media, and earn no gradient."""

import dataclasses

import torch

from verl.agents.interface import ContextRecord, Observation, OwnPrompt, ToolCall, Trajectory, Turn
from verl.protocol import DataProto, objects
from verl.trainer.metrics import agent_metrics
from verl.trainer.rollouts.sampler import conversation_columns
from verl.trainer.rollouts.sequences import join_responses
from verl.workers.rollout.interface import FinishedResponse

CALL = ToolCall("add", {"a": 1, "b": 2})
TURNS = (
    Turn(0, 2, (CALL,), (Observation("3", reward=0.5),), seconds=0.25, reward=0.5),
    Turn(4, 5),
)


def prompts():
    return DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 8, 9], [4, 5, 6]]),
            "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
            "prompt_position_ids": torch.tensor([[0, 0, 1], [0, 1, 2]]),
        },
        {
            "uid": objects(["a", "b"]),
            "raw_prompt_ids": objects([[8, 9], [4, 5, 6]]),
            "multi_modal_data": objects([None, {"images": ["b.png"]}]),
            "prompt_text": objects(["1 + 2?", "other"]),
            "prompt_messages": objects([[{"role": "user", "content": text}] for text in ("1 + 2?", "other")]),
        },
    )


def conversation(**changes):
    fields = {
        "is_sampled": [True, True, False, False, True],
        "turns": TURNS,
        "messages": ({"role": "user", "content": "1 + 2?"},),
        "media": {"images": [{"bytes": b"png"}]},
    }
    trajectory = Trajectory(**fields | changes)
    return FinishedResponse("a", 0, [5, 6, 30, 31, 7], [-0.5, -0.25, 0.0, 0.0, -1.0], "stop", trajectory)


def one_turn():
    return FinishedResponse("b", 0, [5, 6], [-0.5, -0.25], "stop")


def joined(*responses):
    rows = join_responses(prompts(), list(responses), n=1, response_length=7, pad_token_id=0)
    rows.check()
    return rows


def test_observations_belong_to_the_response_and_not_to_the_loss():
    rows = joined(conversation(), one_turn())

    assert rows.batch["response_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]]
    assert rows.batch["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]]
    assert rows.batch["observation_mask"].tolist() == [[0, 0, 1, 1, 0, 0, 0], [0] * 7]
    assert rows.batch["attention_mask"][0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    assert rows.non_tensor_batch["observation_media"].tolist() == [{"images": [{"bytes": b"png"}]}, {}]
    assert rows.non_tensor_batch["turns"][0][0]["calls"] == [{"name": "add", "arguments": {"a": 1, "b": 2}}]


def test_without_conversations_a_batch_has_none_of_their_keys():
    rows = joined(one_turn(), one_turn())

    assert rows.batch["loss_mask"].equal(rows.batch["response_mask"])
    assert not {"observation_mask", "observation_media", "turns"} & set(rows.keys())


def test_positions_are_those_of_the_whole_conversation_and_padding_continues_them():
    positions = torch.tensor([2, 3, 4, 4, 9])  # an image's tokens share positions

    rows = joined(conversation(position_ids=positions), one_turn())

    assert rows.batch["position_ids"].tolist() == [
        [0, 0, 1, 2, 3, 4, 4, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]  # fmt: skip


def test_a_masked_conversation_counts_in_no_loss_and_keeps_its_response():
    rows = joined(conversation(is_masked=True), one_turn())

    assert rows.batch["loss_mask"].sum(-1).tolist() == [0, 2]
    assert rows.batch["response_mask"].sum(-1).tolist() == [5, 2]


def test_an_own_prompt_replaces_that_of_the_row():
    messages = ({"role": "user", "content": "go"},)
    prompt = OwnPrompt([3, 4], torch.tensor([0, 1]), messages, "<user>go", {"images": ["own.png"]})
    own = dataclasses.replace(conversation(prompt=prompt, context_starts=(3,)), uid="b")

    rows = joined(one_turn(), own)

    assert rows.batch["prompts"].tolist() == [[0, 8, 9], [0, 3, 4]]
    assert rows.batch["input_ids"][1].tolist() == [0, 3, 4, 5, 6, 30, 31, 7, 0, 0]
    assert rows.batch["attention_mask"][1].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    assert rows.batch["position_ids"][1].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert rows.non_tensor_batch["multi_modal_data"].tolist() == [None, {"images": ["own.png"]}]
    assert rows.non_tensor_batch["prompt_text"].tolist() == ["1 + 2?", "<user>go"]
    assert rows.non_tensor_batch["prompt_messages"][1] == messages
    assert rows.non_tensor_batch["context_starts"].tolist() == [(), (3,)]
    assert conversation_columns(own)["prompt"] == "<user>go"


def test_the_prompts_of_a_data_set_stay_as_they_were():
    given = prompts()
    before = {key: tensor.clone() for key, tensor in given.batch.items()}
    prompt = OwnPrompt([3], torch.tensor([0]), (), "go")

    join_responses(given, [conversation(prompt=prompt), one_turn()], n=1, response_length=7, pad_token_id=0)

    assert all(torch.equal(given.batch[key], tensor) for key, tensor in before.items())
    assert given.non_tensor_batch["prompt_text"].tolist() == ["1 + 2?", "other"]


def test_the_reward_function_gets_messages_contexts_turns_and_calls():
    asked = {"role": "user", "content": "1 + 2?"}
    first, second = ({"role": "assistant", "content": text} for text in ("look", "3"))
    page = {"role": "user", "content": "page 2"}
    contexts = (ContextRecord((asked, first), 1, 1), ContextRecord((page, second), 1, 1))

    assert conversation_columns(one_turn()) == {}
    assert conversation_columns(conversation(messages=(page, second), contexts=contexts)) == {
        "messages": [page, second],
        "contexts": [[asked, first], [page, second]],
        "num_turns": 2,
        "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}],
        "tool_rewards": [0.5, None],
    }


def test_metrics_count_turns_calls_and_failures():
    answers = (Observation("3", seconds=0.5), Observation("no", failed=True, seconds=0.25))
    refused = Observation("refused")
    failing = Trajectory(
        [True],
        (
            Turn(0, 1, (CALL, CALL), answers, 0.75),
            Turn(2, 3, (CALL, ToolCall("ad", {})), (refused, Observation("none", failed=True)), 0.5),
            Turn(4, 5, (CALL,)),  # not made, because it was the last turn
        ),
        (),
    )
    conversations = [conversation().trajectory.plain_turns(), failing.plain_turns(), []]

    assert agent_metrics(conversations) == {
        "agent/turns_mean": 5 / 3,
        "agent/turns_max": 3.0,
        "agent/tool_calls": 2.0,
        "agent/tool_failures": 1 / 3,
        "agent/tool_s": 0.5,
        "agent/tool/add/calls": 2.0,
        "agent/tool/add/failures": 0.5,
        "agent/tool/add/s": 0.375,
    }


def test_the_steps_of_an_environment_are_counted_without_calls():
    observation = {"text": "", "images": 0, "failed": False, "seconds": 0.5}
    turn = {"calls": [], "observations": [observation], "seconds": 2.0, "reward": 1.0}
    call = {"name": "take", "arguments": {}}
    joined = {**turn, "calls": [call, call], "seconds": 4.0}  # one answer to both
    failed = {**turn, "observations": [observation | {"failed": True}], "seconds": 6.0}
    last = {**turn, "observations": [], "seconds": 0.0}

    assert agent_metrics([[turn, joined, failed], [last]]) == {
        "agent/turns_mean": 2.0,
        "agent/turns_max": 3.0,
        "agent/tool_calls": 1.0,
        "agent/tool_failures": 1 / 4,
        "agent/tool_s": 4.0,
    }
