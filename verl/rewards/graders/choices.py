# SPDX-License-Identifier: Apache-2.0
"""Read the letter of a multiple-choice answer. Imports no torch."""

import re
from collections.abc import Sequence

from verl.rewards.graders.answer_text import choice_of, read

LETTERS = "ABCDEFGH"
MAX_READ = 500  # characters; longer answers are only searched for a statement
BOXED = re.compile(r"\\boxed ?\{ ?(?:\\text ?\{ ?)?\(?([A-H])\)?[ }]*\}")
CONCLUSION = re.compile(r"\A(?:therefore|thus|hence|so),? ", re.IGNORECASE)
# `the answer is B.`, not `the answer: A man`
STATED = re.compile(r"(?i:answer|option|choice)(?i: is)?:?[\s*$]*\(?([A-H])(?=\)|[\s*$]*(?:[.,:;\n]|\Z))")


def choice_letter(text: str, choices: Sequence[str] = ()) -> str | None:
    r"""Return the letter that an answer names, from A to H; None if it names none, or several.

    Read are `B`, `(B)`, `B. He runs`, `Therefore the final answer is: B`, `\boxed{B}`, the text of one of the
    `choices`, and the last `the answer is B` of a longer text.

    Example::

        choice_letter("(B) He runs.")  # "B"
    """
    text = text.strip()
    if boxed := set(BOXED.findall(text)):
        return boxed.pop() if len(boxed) == 1 else None
    if len(text) <= MAX_READ:
        if choice := choice_of(read(CONCLUSION.sub("", text)).text):
            return choice[0]
        if (number := _index(text, choices)) is not None:
            return LETTERS[number]
    stated = STATED.findall(text)
    return stated[-1] if stated else None


def _index(text: str, choices: Sequence[str]) -> int | None:
    """Return the number of the only choice with this text."""
    plain = [_plain(choice) for choice in choices[: len(LETTERS)]]
    return plain.index(_plain(text)) if plain.count(_plain(text)) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")
