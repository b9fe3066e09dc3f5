# SPDX-License-Identifier: Apache-2.0
"""Notes and errors about the columns of data files."""

import re
from types import SimpleNamespace

import pytest

from verl.config.data import DataConfig
from verl.data.bad_rows import BadRow, BadRowError, describe_rows
from verl.data.columns import (
    KINDS,
    answer_of,
    check_conversation_columns,
    check_prompt_columns,
    holds,
    notes_on_columns,
)
from verl.data.messages import prompt_of
from verl.data.plain_files import Source
from verl.data.prompt_template import PromptFormat

PNG, MP4 = b"\x89PNG\r\n\x1a\n" + b"\0" * 8, b"\0\0\0 ftypisom" + b"\0" * 8
IMAGES, VIDEOS, AUDIO = KINDS

MEDIA = {
    "bytes": (IMAGES, [PNG, b"\xff\xd8\xff\xe0abcdefgh"]),
    "struct of bytes": (IMAGES, [{"bytes": PNG, "path": None}]),
    "struct of a path": (IMAGES, [{"bytes": None, "path": "cats/1.JPG"}]),
    "paths": (IMAGES, ["a.png", None, "b c/d.webp"]),
    "urls": (IMAGES, ["https://example.org/a.jpg?size=2"]),
    "lists": (IMAGES, [["a.png", "b.png"], [], ["c.gif"]]),
    "options beside the path": (VIDEOS, [{"video": "a.mp4", "fps": 1.0}]),
    "videos": (VIDEOS, [MP4, b"\x1aE\xdf\xa3" + b"\0" * 9]),
    "sound": (AUDIO, [{"bytes": b"RIFF\0\0\0\0WAVEfmt "}, {"path": "a.flac"}]),
}
OTHER = {
    "nothing": [None, None],
    "empty": ["", [], {}],
    "numbers": [1, 2],
    "text": ["a red square", "see a.png below"],
    "some paths": ["a.png", "none given"],
    "identities": ["a-17", "b-18"],
    "folders": ["data/a", "data/b"],
    "other bytes": [b"%PDF-1.7 and so on"],
    "another structure": [{"width": 3, "height": 4}],
    "broken address": ["http://[a.png"],
    "mixed": [["a.png"], [3]],
}


def rows(column, values):
    return [{column: value} for value in values]


@pytest.mark.parametrize("kind, values", MEDIA.values(), ids=MEDIA)
def test_media_are_recognized_by_their_values(kind, values):
    assert [other.noun for other in KINDS if holds(other, "thing", rows("thing", values))] == [kind.noun]


@pytest.mark.parametrize("values", OTHER.values(), ids=OTHER)
def test_other_values_are_no_media(values):
    assert not any(holds(kind, "path", rows("path", values)) for kind in KINDS)


@pytest.mark.parametrize("name", ["image", "Images", "image_2", "img", "decoded_image", "image_path"])
def test_a_name_says_what_a_reference_without_suffix_is(name):
    values = ["train2014/000000123", "train2014/000000124"]

    assert holds(IMAGES, name, rows(name, values))
    assert not holds(IMAGES, "source", rows("source", values))


@pytest.mark.parametrize(
    ("name", "values"),
    [("image", [None]), ("num_images", [3]), ("has_image", [True]), ("image", ["a red square"]),
     ("image_caption", ["cat"]), ("image", ["clip.mp4"])],
)  # fmt: skip
def test_a_name_alone_is_not_enough(name, values):
    assert not holds(IMAGES, name, rows(name, values))


KEYS = {
    "prompt_key": "prompt", "answer_key": "answer", "image_key": "images", "video_key": "videos",
    "audio_key": "audios",
}  # fmt: skip
SEES, HEARS = ("image", "video"), ("image", "video", "audio")


def prompts(**changes):
    return SimpleNamespace(**(KEYS | changes))


def notes(columns, kinds, template=(), **keys):
    values = {"prompt": ["1?"], "answer": ["1"]} | columns
    length = max(map(len, values.values()))
    table = [{name: column[idx % len(column)] for name, column in values.items()} for idx in range(length)]
    return notes_on_columns("data.train_files", [Source("a.csv", table)], prompts(**keys), template, kinds)


def test_images_that_no_option_reads_are_an_error_for_a_model_with_eyes():
    message = (
        "`data.train_files`: a.csv has the column `picture` of images, which no option reads: set"
        " `data.image_key=picture` (it is `images` now)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        notes({"picture": ["a.png"]}, SEES)
    assert notes({"picture": ["a.png"]}, None) == [message]


def test_a_text_model_learns_without_them_and_that_is_told():
    (note,) = notes({"picture": [PNG]}, ())

    assert note.endswith("column `picture` of images, which the model cannot read: it learns without them")


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"images": [["a.png"]]}, {}),
        ({"picture": ["a.png"]}, {"image_key": "picture"}),
        ({"images": ["a.png"], "source": ["coco/a.png"]}, {}),  # kept for the record
        ({"id": ["7"], "path": [None], "category": ["sums"]}, {}),
        ({"images": [None], "videos": ["a.mp4"]}, {}),
    ],
)
def test_columns_that_are_read_or_hold_no_media_are_not_mentioned(columns, keys):
    assert notes(columns, SEES, **keys) == []


def test_what_the_template_reads_is_read():
    assert notes({"picture": ["a.png"]}, SEES, {"picture"}) == []


def test_other_media_beside_those_that_are_read_are_mentioned():
    (note,) = notes({"videos": ["a.mp4"], "thumbnail": [PNG]}, SEES)

    assert "column `thumbnail` of images, which no option reads" in note


def test_an_image_column_without_values_may_be_filled_further_on():
    (note,) = notes({"images": [None], "picture": ["a.png"]}, SEES)

    assert "`picture`" in note


def test_several_columns_of_images_need_one_list():
    with pytest.raises(
        ValueError, match=r"columns `image_1`, `image_2` of images.*into one column, as a list"
    ):
        notes({"image_1": ["a.png"], "image_2": ["b.png"]}, SEES)


def test_sound_is_told_and_ends_nothing():
    (note,) = notes({"audio": [{"path": "a.wav"}]}, SEES)

    assert "column `audio` of audio, which the model cannot read" in note


def test_sound_that_no_option_reads_is_an_error_for_a_model_with_ears():
    message = (
        "column `audio` of audio, which no option reads: set `data.audio_key=audio` (it is `audios` now)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        notes({"audio": [{"path": "a.wav"}]}, HEARS)
    assert notes({"audios": [["a.wav"]]}, HEARS) == []


@pytest.mark.parametrize(
    ("columns", "keys", "remedy"),
    [
        (["question", "answer"], {}, "no column `prompt`: it has ['answer', 'question']; set"
         " `data.prompt_key=question`"),
        (["prompt", "solution", "id"], {}, "set `data.answer_key=solution`"),
        (["problem", "Ground_Truth"], {}, "no column `prompt` and no column `answer`: it has"
         " ['Ground_Truth', 'problem']; set `data.prompt_key=problem` and `data.answer_key=Ground_Truth`"),
        (["a", "b"], {}, "set `data.prompt_key` to one of them and `data.answer_key` to one of them"),
        (["prompt", "b"], {"answer_key": "c"}, "set `data.answer_key` to one of them"),
    ],
)  # fmt: skip
def test_a_missing_column_comes_with_the_one_that_was_meant(columns, keys, remedy):
    source = Source("a.csv", [], columns)
    with pytest.raises(ValueError, match=re.escape(remedy)):
        check_prompt_columns("data.train_files", [source], prompts(**keys))


CHAT = {"messages_key": "messages", "prompt_key": "prompt", "response_key": "response", "format_prompt": None}


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        (["conversations", "id"], "`data.messages_key=conversations`"),
        (["question", "answer"], "`data.prompt_key=question` and `data.response_key=answer`"),
        (["prompt", "completion"], "`data.response_key=completion`"),
        (
            ["a", "b"],
            "`data.prompt_key` and `data.response_key`, to some of them",
        ),
    ],
)
def test_a_missing_conversation_comes_with_the_column_that_was_meant(columns, remedy):
    source = Source("a.csv", [], columns)
    with pytest.raises(ValueError, match=f"set .*{remedy}$"):
        check_conversation_columns("data.train_files", [source], SimpleNamespace(**CHAT))


def bad(number, reason, file="a.jsonl"):
    return BadRow(number, f"{file}, row {number}", reason)


def test_like_rows_are_one_line_and_others_their_own():
    missing = [bad(n, f"the image /x/{n}.png cannot be read: there is no such file") for n in (3, 7, 9)]
    more = [bad(n, f"the image {n}/y.png cannot be read: there is no such file") for n in range(20, 27)]
    long = bad(5, "the prompt has 70 tokens")

    assert describe_rows([*missing, long, *more]) == [
        "a.jsonl, rows 3, 7, 9 and 7 more; row 3: the image /x/3.png cannot be read: there is no such file",
        "a.jsonl, row 5: the prompt has 70 tokens",
    ]
    assert describe_rows(
        [bad(1, "it is empty"), bad(4, "it is empty"), bad(4, "it is empty", "b.jsonl")]
    ) == [
        "a.jsonl, rows 1 and 4: it is empty",
        "b.jsonl, row 4: it is empty",
    ]


def test_only_so_many_lines_are_listed_and_the_others_counted():
    different = [bad(n, f"reason {'x' * n}") for n in range(5)]

    assert describe_rows(different, 3)[3:] == ["... and 2 rows more"]


def test_the_answer_may_be_a_value_inside_of_a_column():
    row = {"prompt": "?", "reward_model": {"style": "rule", "ground_truth": "5"}, "a.b": "6"}
    source = Source("rows", [row], sorted(row))

    check_prompt_columns("data.train_files", [source], DataConfig(answer_key="reward_model.ground_truth"))
    assert answer_of(row, "reward_model.ground_truth") == "5"
    assert answer_of(row, "reward_model")["style"] == "rule"
    assert answer_of(row, "a.b") == "6"
    with pytest.raises(BadRowError, match=r"no `truth` in it; there is \['ground_truth', 'style'\]"):
        answer_of(row, "reward_model.truth")
    with pytest.raises(ValueError, match=r"has no column `reward.ground_truth`"):
        check_prompt_columns("data.train_files", [source], DataConfig(answer_key="reward.ground_truth"))


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (DataConfig(prompt_key="chat.text"), r"`chat.text` \(`data.prompt_key`\)"),
        (DataConfig(answer_key="chats.text"), r"`chats.text` \(`data.answer_key`\)"),
    ],
)
def test_a_column_that_a_single_row_lacks_is_named_and_no_prompt_is_inside_of_one(config, missing):
    row = {"chat": {"text": "?"}, "prompt": "?", "answer": "5"}

    with pytest.raises(BadRowError, match=f"column {missing} is missing; the row has"):
        prompt_of(row, config, PromptFormat(None), ())
