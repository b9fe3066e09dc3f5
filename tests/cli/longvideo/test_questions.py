# SPDX-License-Identifier: Apache-2.0
"""Replies of the reasoning model are read as questions, or refused with a reason."""

import pytest
from verl_longvideo.captions import clock
from verl_longvideo.questions import Asking, MalformedError, parse, prose_of
from verl_longvideo.rows import split_videos

from tests.cli.longvideo.narrator import QUESTION

ASKING = Asking("a.mp4", "temporal", 1)
REPLY = QUESTION.format(category="first")


def test_a_reply_in_long_rls_form_is_a_question():
    item = parse(ASKING, REPLY)

    assert item.question == "What happens first?" and item.answer == "B"
    assert list(item.options.items())[:2] == [("A", "It moves left."), ("B", "It moves right.")]
    assert item.reasons == [
        "The pattern moves to the right at the start.",
        "It still does, so A, C and D are wrong.",
    ]
    assert item.problem.splitlines()[2] == "B. It moves right."


@pytest.mark.parametrize(
    "reply",
    [
        f"<think>QUESTION: a draft?\nANSWER: A</think>\n{REPLY}",
        REPLY.replace("QUESTION:", "**QUESTION:**").replace("ANSWER:", "**ANSWER:**"),
        REPLY.replace("ANSWER: B", "ANSWER: (B) It moves right."),
        REPLY.replace("A. ", "A) ").replace("B. ", "B) ").replace("C. ", "C) ").replace("D. ", "D) "),
    ],
)
def test_thoughts_bold_headings_and_brackets_do_not_matter(reply):
    item, plain = parse(ASKING, reply), parse(ASKING, REPLY)

    assert (item.question, item.options, item.answer) == (plain.question, plain.options, plain.answer)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I cannot help with that.", "must have QUESTION:, ANSWER: and REASONS: once and in order, found"),
        (REPLY * 2, "once and in order"),
        (REPLY.replace("What happens first?", ""), "the question is empty"),
        (REPLY.replace("B. It moves right.\n", ""), r"in order, found \['A', 'C', 'D'\]"),
        (REPLY.replace("It moves right.", "it moves left."), "two options are the same"),
        (
            REPLY.replace("ANSWER: B", "ANSWER: E"),
            r"the answer must be one of \['A', 'B', 'C', 'D'\], found 'E'",
        ),
        (REPLY.replace("ANSWER: B", "ANSWER: Both"), "found 'Both'"),
        (REPLY.replace("\n- ", "\n"), "there are no reasons"),
        (REPLY.replace("first?", "in the timeline?"), "speaks of the timeline"),
        (REPLY.replace("It stands", "<answer>It stands"), "tags of the response format"),
        (REPLY.replace("It still does", "</think>It still does"), "no|once|tags"),
    ],
)
def test_a_malformed_reply_says_why(reply, reason):
    with pytest.raises(MalformedError, match=reason):
        parse(ASKING, reply)


def test_prose_must_be_there_and_must_not_speak_of_captions():
    assert prose_of(ASKING, "<think>hm</think> It is B.\n") == "It is B."
    for text in ("", "<think>hm</think>", "The caption says B.", "It is <answer>B</answer>."):
        with pytest.raises(MalformedError):
            prose_of(ASKING, text)


def test_times_are_hours_minutes_and_seconds():
    assert [clock(seconds) for seconds in (0, 9.99, 70, 3661)] == ["0:00:00", "0:00:09", "0:01:10", "1:01:01"]


def test_videos_are_divided_by_the_seed_without_an_overlap():
    videos = [f"{number}.mp4" for number in range(20)]

    split, other = split_videos(videos, 5, 1 / 3, 1), split_videos(videos, 5, 1 / 3, 2)

    assert (
        len(split.val) == 5 and len(split.sft) == 5 and not split.val & split.sft
    )  # a third of the other 15
    assert split == split_videos(videos[::-1], 5, 1 / 3, 1) != other
