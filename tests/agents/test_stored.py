# SPDX-License-Identifier: Apache-2.0
"""Conversations in checkpoints."""

import torch
from PIL import Image

from verl.agents.interface import (
    ContextRecord,
    Observation,
    OwnPrompt,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
    from_plain,
    to_plain,
)
from verl.utils.plain_data import decode, encode

ASKED = ({"role": "user", "content": "Look."},)
PICTURE = {"path": "/cache/1f.png"}


def test_a_conversation_is_the_same_after_storing_without_the_messages_of_observations():
    page = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (4, 4))}]}]
    seen = Observation("seen", images=[PICTURE], reward=0.5, seconds=0.1)
    turns = (
        Turn(0, 3, (ToolCall("zoom", {"box": [1, 2]}),), (seen,), seconds=1.5, reward=0.5),
        Turn(7, 9, observations=(Observation("next page", messages=page),)),
    )
    trajectory = Trajectory(
        is_sampled=[True] * 3 + [False] * 4 + [True] * 2,
        turns=turns,
        messages=ASKED,
        media={"images": [PICTURE]},
        position_ids=torch.arange(9),
        stop_reason=StopReason.DONE,
        prompt=OwnPrompt([5, 6], torch.arange(2), ASKED, "Look.", {"images": []}),
        context_starts=(3,),
        contexts=(ContextRecord(ASKED, 1, 1), ContextRecord(ASKED, 1, 1, num_images=1)),
    )

    again = from_plain(decode(encode(to_plain(trajectory), "a conversation")))

    assert again.turns[0] == turns[0]
    assert again.turns[1] == Turn(7, 9, observations=(Observation("next page"),))
    assert again.position_ids.equal(torch.arange(9)) and again.prompt.position_ids.equal(torch.arange(2))
    for name in ("is_sampled", "messages", "media", "stop_reason", "context_starts", "contexts", "is_masked"):
        assert getattr(again, name) == getattr(trajectory, name), name
    assert again.plain_turns() == trajectory.plain_turns()
    assert (again.prompt.token_ids, again.prompt.text) == ([5, 6], "Look.")


def test_a_conversation_without_media_or_a_prompt_of_its_own_is_the_same_after_storing():
    trajectory = Trajectory([True], (Turn(0, 1),), ASKED, is_masked=True)

    assert from_plain(decode(encode(to_plain(trajectory), "a conversation"))) == trajectory
