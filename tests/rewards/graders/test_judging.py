# SPDX-License-Identifier: Apache-2.0
"""Ways to judge: what is read of an answer, and what must not change a score."""

import asyncio
import itertools

import pytest
from jinja2 import UndefinedError

from tests.helpers.growth import grows_with_length
from verl.rewards.graders.judging import (
    Criterion,
    prefer,
    rank,
    read_checklist,
    read_choice,
    read_criteria,
    read_ranking,
    read_score,
    render,
    tournament,
)


def question(first, second):
    return f"{first}|{second}"


def judge_by(choose):
    """A judge of pairs that answers with `choose(first, second)`."""
    asked = []

    async def ask(text):
        asked.append(text)
        return choose(*text.split("|"))

    return ask, asked


def longer(first, second):
    return "[[A]]" if len(first) > len(second) else "[[B]]" if len(first) < len(second) else "[[tie]]"


def test_values_in_a_prompt_are_text_and_missing_ones_an_error(tmp_path):
    file = tmp_path / "prompt.jinja"
    file.write_text("{{ response }} of {{ prompt }}\n")

    assert render(file, response="{{ prompt }} {% if %}", prompt="b") == "{{ prompt }} {% if %} of b"
    with pytest.raises(UndefinedError, match="'prompt' is undefined"):
        render(file, response="a")


@pytest.mark.parametrize(
    ("answer", "bounds", "score"),
    [
        ("Score: 7", (0, 10), 0.7),
        ("**Score**: 2.5", (0, 5), 0.5),
        ("Score: 1, or Score: 4", (1, 5), 0.75),
        ("<think>Score: 9</think> Score: 3", (0, 10), 0.3),
        ("Score: 11", (0, 10), None),
        ("Score: -1", (0, 10), None),
        ("7", (0, 10), None),
    ],
)
def test_a_score_is_the_last_one_on_its_scale(answer, bounds, score):
    assert read_score(answer, *bounds) == score


@pytest.mark.parametrize(
    ("answer", "win"),
    [
        ("[[A]]", 1.0), ("[[b]]", 0.0), ("[[C]]", 0.5), ("[[Tie]]", 0.5), ("[[A]] no, [[B]]", 0.0),
        ("A", None), ("<think>[[A]]</think>", None),
    ],
)  # fmt: skip
def test_a_choice_is_the_last_one(answer, win):
    assert read_choice(answer) == win


@pytest.mark.parametrize(
    ("choose", "win"),
    [
        (longer, 1.0),
        (lambda first, second: "[[A]]", 0.5),  # whatever is shown first
        (lambda first, second: "[[B]]", 0.5),
        (lambda first, second: "[[A]]" if first == "long" else "I cannot say", 1.0),  # one answer counts
        (lambda first, second: "I cannot say", None),
    ],
)
def test_a_preference_does_not_depend_on_the_order(choose, win):
    ask, _ = judge_by(choose)

    forward = asyncio.run(prefer(ask, question, "long", "s"))
    backward = asyncio.run(prefer(ask, question, "s", "long"))

    assert forward == win
    assert backward == (None if win is None else 1.0 - win)


def test_a_tournament_gives_the_share_of_comparisons_won_and_asks_each_pair_in_both_orders():
    ask, asked = judge_by(longer)

    scores = asyncio.run(tournament(ask, question, ["aaa", "a", "aa", "aa"]))

    # aaa wins 3 of 3; a 0 of 3; each aa beats a, loses to aaa and ties: 1.5 of 3
    assert scores == [1.0, 0.0, 0.5, 0.5]
    assert sorted(asked) == sorted(
        [question(*pair) for pair in itertools.permutations(["aaa", "a", "aa"], 2)]
        + ["aaa|aa", "aa|aaa", "a|aa", "aa|a"]  # the other aa; equal responses are not asked about
    )


def test_a_response_without_a_readable_comparison_has_no_score():
    ask, _ = judge_by(lambda first, second: "?")

    assert asyncio.run(tournament(ask, question, ["a", "b"])) == [None, None]


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ("[3] > [1] > [2]", [0.5, 0.0, 1.0]),
        ("[1]>[2]>[3], no: [2] > [3] > [1]", [0.0, 1.0, 0.5]),
        ("[1] = [2] > [3]", [0.75, 0.75, 0.0]),  # places 0 and 1 of 0 to 2
        ("[1] = [2] = [3]", [0.5, 0.5, 0.5]),
        ("[1] > [2]", None),
        ("[1] > [2] > [2]", None),
        ("[0] > [1] > [2]", None),
        ("1 > 2 > 3", None),
        (f"[{'1' * 500_000}] > [2] > [3]", None),
    ],
)
def test_a_ranking_names_all_responses_once_and_ties_share_places(answer, scores):
    assert read_ranking(answer, 3) == scores


def test_the_scores_of_a_group_do_not_depend_on_the_order_of_its_responses():
    shown = []

    async def ask(text):
        shown.append(text)
        return "[2] > [1] > [3]"  # by place: it always likes the second one

    results = {
        tuple(sorted(zip(order, asyncio.run(rank(ask, ",".join, order)), strict=True)))
        for order in itertools.permutations(["a", "b", "c"])
    }

    assert len(results) == len(set(shown)) == 1
    assert sorted(score for _, score in results.pop()) == [0.0, 0.5, 1.0]


def test_texts_with_lone_surrogates_are_ranked():
    async def ask(text):
        return "[1] > [2]" if text[0] == "\ud800" else "[2] > [1]"

    assert asyncio.run(rank(ask, ",".join, ["\udc00", "\ud800"])) == [0.0, 1.0]


def test_equal_responses_of_a_group_are_shown_once_and_share_their_score():
    async def ask(text):
        assert sorted(text.split(",")) == ["a", "b"]
        return "[1] > [2]" if text[0] == "b" else "[2] > [1]"

    assert asyncio.run(rank(ask, ",".join, ["a", "b", "a"])) == [0.0, 1.0, 0.0]
    assert asyncio.run(rank(ask, ",".join, ["a", "a"])) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("1: yes\n2: yes\n3: no", 1.0),  # (2 + 1) / (2 + 1)
        ("1. yes\n2: no", 2 / 3),
        ("**2**: Yes", 1 / 3),
        ("1: yes\n2: no\n3: yes", 1 / 3),  # (2 - 1) / 3
        ("3: yes", 0.0),
        ("yes", None),
        ("7: yes", None),
    ],
)
def test_a_checklist_is_the_weight_that_is_met_of_all_that_is_wanted(answer, score):
    criteria = read_criteria(["is short", {"criterion": "is right"}, {"criterion": "insults", "points": -1}])
    criteria[0] = criteria[0]._replace(weight=2.0)

    assert read_checklist(answer, criteria) == (None if score is None else pytest.approx(score))


def test_criteria_without_a_weight_above_zero_are_an_error():
    assert read_criteria(["a"]) == [Criterion("a", 1.0)]
    with pytest.raises(ValueError, match="need a weight above zero"):
        read_criteria([{"criterion": "insults", "weight": -1}])


@pytest.mark.parametrize("part", ["\n", " ", "1", "1:", "[[", "[1]", "Score", "Score :", "</think>", "* "])
def test_the_time_of_reading_an_answer_grows_with_its_length_and_not_faster(part):
    criteria = read_criteria(["is short"])

    def read(answer):
        return (
            read_score(answer),
            read_choice(answer),
            read_ranking(answer, 3),
            read_checklist(answer, criteria),
        )

    assert grows_with_length(read, lambda length: part * (length // len(part)) + "a", 8_000)
