# SPDX-License-Identifier: Apache-2.0
"""Steps 4 and 5, reason and parse: ask for questions with reasons and answers, and read the replies.

A reply has Long-RL's form: `QUESTION:`, options from `A.` on, `ANSWER:` a letter, `REASONS:` with bullets
under headings `##### From [0:00:00 - 0:00:10]:`. What is not in this form is malformed, with a reason.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from verl.rewards.graders.choices import LETTERS
from verl_longvideo.asking import Question, question, text_message
from verl_longvideo.captions import Timeline, clock
from verl_longvideo.prompts import REASON, REWRITE
from verl_longvideo.settings import Settings

THOUGHTS = re.compile(r"\A.*</think>", re.DOTALL)  # of a model that shows them
HEADINGS = re.compile(r"^[*# ]*(QUESTION|ANSWER|REASONS?):[* ]*", re.MULTILINE)
OPTION = re.compile(r"^[* ]*\(?([A-H])[.):][* ]*(.*\S)[* ]*$", re.MULTILINE)
ANSWER = re.compile(r"[\s*(]*([A-H])(?![A-Za-z])")
BULLET = re.compile(r"^\s*[-*] +(.*\S)", re.MULTILINE)
TAGS = re.compile(r"</?(?:think|answer|video|image)>")  # of the response format, and markers of media
SOURCE_WORDS = re.compile(r"\b(?:captions?|timelines?)\b", re.IGNORECASE)


class MalformedError(ValueError):
    """A reply that is not a question, or not prose; says why."""


class Asking(NamedTuple):
    """One question that is asked for: its category, and its number among those of the category."""

    video: str
    category: str
    number: int  # from 1

    @property
    def name(self) -> str:
        return f"{self.video}, {self.category} {self.number}"

    def file_in(self, folder: Path) -> Path:
        return folder / self.video / f"{self.category}-{self.number}.json"


class Item(NamedTuple):
    """A question with its answer."""

    asking: Asking
    question: str
    options: dict[str, str]  # by letter
    answer: str  # letter
    reasons: list[str]

    @property
    def problem(self) -> str:
        """The question and its options, as rows have them."""
        return "\n".join([self.question, *(f"{letter}. {text}" for letter, text in self.options.items())])


def askings(video: str, settings: Settings) -> Iterator[Asking]:
    """Yield the questions to ask for about a video."""
    for category in settings.prompts.categories:
        for number in range(1, settings.questions + 1):
            yield Asking(video, category, number)


def reason_question(asking: Asking, timeline: Timeline, settings: Settings) -> Question:
    """Return the request for a question."""
    values = {
        "timeline": timeline.text,
        "duration": clock(timeline.duration),
        "category": asking.category,
        "description": settings.prompts.categories[asking.category],
        "number": asking.number,
    }
    prompt = settings.prompts.render(REASON, values)
    file = asking.file_in(settings.out / "questions")
    return question(asking.name, file, settings.reason, [prompt], partial(text_message, prompt))


def rewrite_question(item: Item, settings: Settings) -> Question:
    """Return the request for the reasons as prose."""
    values = {
        "question": item.question,
        "options": item.options,
        "answer": item.answer,
        "reasons": item.reasons,
        "category": item.asking.category,
    }
    prompt = settings.prompts.render(REWRITE, values)
    file = item.asking.file_in(settings.out / "reasoning")
    return question(item.asking.name, file, settings.reason, [prompt], partial(text_message, prompt))


def parse(asking: Asking, reply: str) -> Item:
    """Read the question in a reply.

    Raises:
        MalformedError: It has another form, or contradicts itself.
    """
    parts = _parts(THOUGHTS.sub("", reply))
    found = OPTION.findall(parts["QUESTION"])
    text = " ".join(OPTION.split(parts["QUESTION"], maxsplit=1)[0].split())
    options = {letter: " ".join(option.split()) for letter, option in found}
    if not text:
        raise MalformedError("the question is empty")
    if len(found) < 2 or [letter for letter, _ in found] != list(LETTERS[: len(found)]):
        raise MalformedError(f"the options must be A, B, ... in order, found {[one for one, _ in found]}")
    if len({option.casefold() for option in options.values()}) < len(options):
        raise MalformedError("two options are the same")
    answer = ANSWER.match(parts["ANSWER"])
    if answer is None or answer[1] not in options:
        found_answer = parts["ANSWER"].strip()[:40]
        raise MalformedError(f"the answer must be one of {list(options)}, found {found_answer!r}")
    reasons = [" ".join(reason.split()) for reason in BULLET.findall(parts["REASON"])]
    if not reasons:
        raise MalformedError("there are no reasons")
    _check_words(" ".join([text, *options.values()]))
    if TAGS.search(" ".join(reasons)):
        raise MalformedError("the reasons have tags of the response format")
    return Item(asking, text, options, answer[1], reasons)


def prose_of(asking: Asking, reply: str) -> str:
    """Read reasons as prose; a MalformedError says why they cannot be used."""
    text = THOUGHTS.sub("", reply).strip()
    if not text:
        raise MalformedError("the reasoning is empty")
    _check_words(text)
    return text


def _check_words(text: str) -> None:
    if TAGS.search(text):
        raise MalformedError("it has tags of the response format")
    if word := SOURCE_WORDS.search(text):
        raise MalformedError(f"it speaks of the {word[0].lower()}, which whoever answers does not see")


def _parts(reply: str) -> dict[str, str]:
    """Return the text behind each heading."""
    pieces = HEADINGS.split(reply)
    names = [name.removesuffix("S") for name in pieces[1::2]]
    if names != ["QUESTION", "ANSWER", "REASON"]:
        raise MalformedError(f"it must have QUESTION:, ANSWER: and REASONS: once and in order, found {names}")
    return dict(zip(names, pieces[2::2], strict=True))


def as_dict(item: Item) -> dict[str, Any]:
    """Return an item as plain values."""
    return {
        "video": item.asking.video, "category": item.asking.category, "number": item.asking.number,
        "question": item.question, "options": item.options, "answer": item.answer, "reasons": item.reasons,
    }  # fmt: skip
