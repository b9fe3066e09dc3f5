# SPDX-License-Identifier: Apache-2.0
"""The first responses of a batch are recorded with their texts, tokens, scores and media."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.helpers.media import save_image, save_video
from tests.trainer.rollouts.sampling import Words
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.protocol import DataProto, objects
from verl.trainer.rollouts.rollout_log import MAX_FRAMES, RolloutLog
from verl.trainer.rollouts.scores import reward_values
from verl.viewer.rollout_store import step_files

# Two prompts with two responses each, in the order that balancing left: b1, a0, b0, a1.
ROW_IDS, UIDS = [3, 0, 2, 1], ["b", "a", "b", "a"]
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])  # (4, 3)


def make_batch(media=(None, None, None, None), trained=MASK, overall=(1.0, 2.0, 3.0, 4.0)):
    prompt_mask = torch.tensor([[0, 1], [1, 1], [0, 1], [1, 1]])
    batch = DataProto.from_dict(
        {
            "row_ids": torch.tensor(ROW_IDS),
            "responses": torch.tensor([[7, 8, 0], [1, 2, 3], [9, 0, 0], [4, 5, 0]]),
            "prompt_mask": prompt_mask,
            "attention_mask": torch.cat([prompt_mask, MASK], dim=1),
            "response_mask": MASK,
            "loss_mask": trained,
            "rollout_log_probs": -torch.arange(12.0).reshape(4, 3),
            "old_log_probs": -torch.arange(12.0).reshape(4, 3) - 0.5,
            "token_level_scores": torch.tensor([[0, 1, 0], [0, 0, 2.0], [3, 0, 0], [0, 4, 0]]),
            "advantages": torch.tensor([[1.0, 3, 0], [1, 2, 6], [5, 0, 0], [-1, -2, 0]]),
        },
        {
            "uid": UIDS,
            "prompt_text": [f"prompt {uid}" for uid in UIDS],
            "prompt_messages": objects([[{"role": "user", "content": uid}] for uid in UIDS]),
            "ground_truth": [42, 41, 42, 41],
            "finish_reason": ["stop", "length", "stop", "stop"],
            "multi_modal_data": objects(media),
        },
    )
    values = {"overall": list(overall), "format": [0.0, 1.0, 0.0, 1.0]}
    return batch.merge({"reward_values": reward_values(values)})


def kept_rows(tmp_path, batch, num_groups, media=None):
    log = RolloutLog(tmp_path / "run", num_groups, Words(), media, skip_special_tokens=True)
    log.keep(batch, step=5)
    return {step: pq.read_table(path).to_pylist() for step, path in step_files(tmp_path / "run").items()}


def test_the_first_groups_are_kept_whole_in_the_order_in_which_they_were_sampled(tmp_path):
    (rows,) = kept_rows(tmp_path, make_batch(), 1).values()

    assert [(row["group"], row["sample"], row["response"]) for row in rows] == [
        ("a", 0, "1 2 3"),
        ("a", 1, "4 5"),
    ]


def test_a_row_has_the_values_of_the_batch(tmp_path):
    (rows,) = kept_rows(tmp_path, make_batch(), 5).values()

    row = rows[0]  # a0, the batch's second
    assert len(rows) == 4
    assert row["prompt"] == "prompt a" and row["ground_truth"] == "41"
    assert json.loads(row["messages"]) == [{"role": "user", "content": "a"}]
    assert (row["step"], row["prompt_length"], row["response_length"]) == (5, 2, 3)
    assert (row["finish_reason"], row["score"], row["advantage"]) == ("length", 2.0, 3.0)  # (1 + 2 + 6) / 3
    assert dict(row["reward_values"]) == {"overall": 2.0, "format": 1.0}
    assert row["token_ids"] == [1, 2, 3] and row["tokens"] == ["1", "2", "3"]
    assert row["rollout_log_probs"] == [-3.0, -4.0, -5.0]
    assert row["old_log_probs"] == [-3.5, -4.5, -5.5]
    assert row["advantages"] == [1.0, 2.0, 6.0]
    assert rows[2]["token_ids"] == [9] and rows[2]["advantages"] == [5.0]  # without the padding


def test_a_response_that_was_rejected_keeps_its_score_and_has_no_advantage(tmp_path):
    trained = MASK.clone()
    trained[1] = 0

    (rows,) = kept_rows(tmp_path, make_batch(trained=trained), 1).values()

    assert (rows[0]["response"], rows[0]["score"], rows[0]["advantage"]) == ("1 2 3", 2.0, None)


def test_a_response_that_the_reward_function_failed_for_has_no_score(tmp_path):
    (rows,) = kept_rows(tmp_path, make_batch(overall=[1.0, math.nan, 3.0, 4.0]), 1).values()

    assert [row["score"] for row in rows] == [None, 4.0]


def test_none_are_kept_where_none_are_wanted(tmp_path):
    assert kept_rows(tmp_path, make_batch(), 0) == {}
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def media_loader(tmp_path_factory):
    from verl.data.readers import load_processor
    from verl.models.tiny import save_tiny_model

    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen2_5_vl")
    return MediaLoader(load_processor(str(folder)), MediaOptions(784, 50176))


def test_images_and_frames_that_the_model_saw_are_kept_once_for_a_group(tmp_path, media_loader):
    image = save_image(tmp_path / "one.png", 56, 56)
    film = save_video(tmp_path / "film.mp4", 56, 56, num_frames=80)
    ours = {"images": [image], "videos": [film]}

    (rows,) = kept_rows(tmp_path, make_batch([None, ours, None, ours]), 1, media_loader).values()

    assert rows[0]["media"] == rows[1]["media"] and rows[0]["num_media"] == 2
    picture, frames = rows[0]["media"]
    assert (picture["kind"], picture["source"], len(picture["files"])) == ("image", image, 1)
    assert (frames["kind"], frames["source"], len(frames["files"])) == ("video", film, MAX_FRAMES)
    assert picture["times"] is None
    assert frames["times"][0] == 0 and frames["times"] == sorted(set(frames["times"]))
    names = {path.name for path in (tmp_path / "run/rollouts/media").iterdir()}
    assert names == {*picture["files"], *frames["files"]}
    assert picture["problem"] is None and frames["problem"] is None


def test_the_own_prompts_of_a_group_keep_their_own_images(tmp_path, media_loader):
    ours, other = ({"images": [save_image(tmp_path / f"{width}.png", width, 56)]} for width in (56, 84))

    (rows,) = kept_rows(tmp_path, make_batch([None, ours, None, other]), 1, media_loader).values()

    assert [row["media"][0]["source"] for row in rows] == [*ours["images"], *other["images"]]


def test_an_image_that_is_gone_is_named_and_ends_nothing(tmp_path, media_loader):
    gone = {"images": [str(tmp_path / "gone.png")], "videos": []}

    (rows,) = kept_rows(tmp_path, make_batch([None, gone, None, gone]), 1, media_loader).values()

    (medium,) = rows[0]["media"]
    assert medium["files"] == [] and "gone.png" in medium["problem"]


CALL = {"name": "zoom\ud800", "arguments": {"box": [0, 0, 1, 1]}}
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}]
SCHEMA = {"type": "function", "function": {"name": "zoom"}}


def observation(images, **changed):
    return {"text": "seen", "images": images, "videos": 0, "failed": False, "seconds": 0.5} | changed


def turn(start, stop, observations, *, is_shown, **changed):
    calls = [CALL] * len(observations)
    more = {"seconds": 1.0, "reward": None, "is_shown": is_shown}
    return {"start": start, "stop": stop, "calls": calls, "observations": observations} | more | changed


def context(start, num_turns, messages, **changed):
    counts = {"num_opening": 1, "num_turns": num_turns, "num_images": 0, "num_videos": 0}
    return {"start": start, "messages": messages, "tools": None, **counts, **changed}


def test_each_context_is_kept_with_its_first_pictures_and_those_of_its_turns(tmp_path, media_loader):
    sides = (56, 84, 112, 140)
    files = [Path(save_image(tmp_path / f"{side}.png", side, 56)) for side in sides]
    pictures = [{"bytes": file.read_bytes()} for file in files]
    turns = [
        turn(0, 1, [observation(1)], is_shown=True),
        turn(2, 3, [observation(1), observation(1)], is_shown=True),
    ]
    own = [{"type": "function", "function": {"name": "look"}}]
    # The first context has the prompt's image.
    first, second = context(0, 1, MESSAGES, num_images=1), context(1, 1, MESSAGES, num_images=1, tools=own)
    conversations = {
        "turns": objects([[], turns, [], []]),
        "observation_media": objects([{}, {"images": pictures, "videos": []}, {}, {}]),
        "contexts": objects([[], [first, second], [], []]),
        "stop_reason": objects([None, "stop", None, None]),
    }
    log = RolloutLog(tmp_path / "run", 1, Words(), media_loader, skip_special_tokens=True, tools=[SCHEMA])

    log.keep(make_batch().merge(conversations), step=5)

    talk, _ = pq.read_table(step_files(tmp_path / "run")[5]).to_pylist()
    first, second = talk["contexts"]

    def widths(media):
        return [Image.open(tmp_path / "run/rollouts/media" / one["files"][0]).width for one in media]

    assert first["media"] == [] and widths(second["media"]) == [84]
    seen = [[widths(one["media"]) for one in each["observations"]] for each in talk["turns"]]
    assert seen == [[[56]], [[112], [140]]]
    assert (first["start"], second["start"]) == (0, 1)
    assert [json.loads(one["tools"]) for one in (first, second)] == [[SCHEMA], own]


def test_turns_are_kept_with_their_calls_and_the_pictures_that_the_policy_saw(tmp_path, media_loader):
    files = [Path(save_image(tmp_path / f"{side}.png", side, 56)) for side in (56, 84)]
    pictures = [{"bytes": file.read_bytes()} for file in files]
    failed = observation(0, text="Error", failed=True, seconds=None)
    seen = [observation(1), failed, observation(1)]
    turns = [turn(0, 1, seen, is_shown=True, reward=0.5), turn(2, 3, [observation(1)], is_shown=False)]
    conversations = {
        "turns": objects([[], turns, [], []]),
        "observation_media": objects([{}, {"images": pictures, "videos": []}, {}, {}]),
        "contexts": objects([[], [context(0, 2, MESSAGES)], [], []]),
        "stop_reason": objects([None, "turns", None, None]),
    }
    trained = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0]])
    log = RolloutLog(tmp_path / "run", 1, Words(), media_loader, skip_special_tokens=True, tools=[SCHEMA])

    log.keep(make_batch(trained=trained).merge(conversations), step=5)

    talk, plain = pq.read_table(step_files(tmp_path / "run")[5]).to_pylist()
    assert (talk["num_turns"], talk["num_calls"], talk["num_failures"]) == (2, 4, 1)
    assert (talk["stop_reason"], talk["is_masked"], plain["is_masked"]) == ("turns", False, True)
    [whole] = talk["contexts"]
    assert json.loads(whole["messages"]) == MESSAGES and json.loads(whole["tools"]) == [SCHEMA]
    first, last = talk["turns"]
    assert [(one["text"], one["start"], one["stop"]) for one in (first, last)] == [("1", 0, 1), ("3", 2, 3)]
    assert first["reward"] == 0.5 and (first["is_shown"], last["is_shown"]) == (True, False)
    assert first["calls"][0] == {"name": "zoom?", "arguments": '{"box": [0, 0, 1, 1]}'}
    assert [(one["failed"], one["seconds"], one["num_media"]) for one in first["observations"]] == [
        (False, 0.5, 1), (True, None, 0), (False, 0.5, 1),
    ]  # fmt: skip
    files = [medium["files"] for one in first["observations"] for medium in one["media"]]
    assert [Image.open(tmp_path / "run/rollouts/media" / file).width for [file] in files] == [56, 84]
    [unseen] = last["observations"]
    assert unseen["num_media"] == 1 and unseen["media"] == []
    assert plain["turns"] is None and plain["num_turns"] is None
