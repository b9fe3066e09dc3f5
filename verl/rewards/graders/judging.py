# SPDX-License-Identifier: Apache-2.0
"""Ways to judge responses with a language model: one by one, in pairs, as a group, by a list of criteria.

Each way is a function that makes the questions and reads the answers; whoever calls it asks the model. A
score is in [0, 1], or None where the model gave no verdict. Prompts are Jinja files, see `render`.
"""

import asyncio
import hashlib
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

Ask = Callable[[str], Awaitable[str]]  # sends the text of a question, and returns the answer
THOUGHTS = "</think>"  # what a judge wrote before is not read
SCORE = re.compile(r"(?i)score[\s*_`]*:[\s*_`]*(-?\d+(?:\.\d+)?)(?![\d.]*\d)")
CHOICE = re.compile(r"\[\[\s*(A|B|C|tie)\s*\]\]", re.IGNORECASE)
RANKING = re.compile(r"\[\d+\](?:\s*[>=]\s*\[\d+\])*")
ITEM = re.compile(r"(?im)^[^\w\n]*(\d+)[^\w\n]+(yes|no)\b")
WINS = {"a": 1.0, "b": 0.0, "c": 0.5, "tie": 0.5}  # of the response that is shown first


def render(path: str | Path, **values: Any) -> str:
    """Fill a prompt, which is a Jinja file; a name without a value is an error, and values are plain text."""
    return _template(Path(path)).render(**values).strip()


@cache
def _template(path: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(path.read_text(encoding="utf-8"))


def final_answer(response: str) -> str:
    return response.rpartition(THOUGHTS)[2].strip()


def read_score(answer: str, lowest: float = 0.0, highest: float = 10.0) -> float | None:
    """Return the last `Score: N` of an answer, from `lowest` to `highest`, as a number in [0, 1]."""
    found = SCORE.findall(final_answer(answer))
    if not found or not lowest <= float(found[-1]) <= highest:
        return None
    return (float(found[-1]) - lowest) / (highest - lowest)


def read_choice(answer: str) -> float | None:
    """Return 1 for the last `[[A]]` of an answer, 0 for `[[B]]`, 0.5 for `[[C]]` or `[[tie]]`."""
    found = CHOICE.findall(final_answer(answer))
    return WINS[found[-1].lower()] if found else None


async def prefer(ask: Ask, question: Callable[[str, str], str], first: str, second: str) -> float | None:
    """Return how much of two comparisons `first` wins, each response being shown first once.

    So the place of a response does not count: the preference for `second` is one minus this one, and a judge
    that always chooses the first place has none. `question` asks about two responses, A and B of the answer.
    """
    shown_first, shown_second = await asyncio.gather(
        ask(question(first, second)), ask(question(second, first))
    )
    wins = [read_choice(shown_first), read_choice(shown_second)]
    if wins[1] is not None:
        wins[1] = 1.0 - wins[1]
    known = [win for win in wins if win is not None]
    return sum(known) / len(known) if known else None


async def tournament(
    ask: Ask, question: Callable[[str, str], str], responses: Sequence[str]
) -> list[float | None]:
    """Compare each pair of responses twice, and return the share of its comparisons that each one wins.

    n responses take n (n - 1) questions; equal responses are a tie and take none.
    """
    pairs = list(itertools.combinations(range(len(responses)), 2))

    async def compare(first: int, second: int) -> float | None:
        if responses[first] == responses[second]:
            return 0.5
        return await prefer(ask, question, responses[first], responses[second])

    wins: list[list[float]] = [[] for _ in responses]
    results = await asyncio.gather(*(compare(*pair) for pair in pairs))
    for (first, second), win in zip(pairs, results, strict=True):
        if win is not None:
            wins[first].append(win)
            wins[second].append(1.0 - win)
    return [sum(each) / len(each) if each else None for each in wins]


def read_ranking(answer: str, count: int) -> list[float] | None:
    """Return scores by the last ranking of an answer, `[3] > [1] = [2]`, which must name all of `count` once.

    The best has 1, the worst 0, and those between equal steps; a tie shares the mean of its places.
    """
    found = RANKING.findall(final_answer(answer))
    if not found or count < 2:
        return None
    # Python reads no number of over 4,300 digits.
    places = [[int(number[:9]) - 1 for number in re.findall(r"\d+", tie)] for tie in found[-1].split(">")]
    if sorted(itertools.chain(*places)) != list(range(count)):
        return None
    scores, before = [0.0] * count, 0
    for tie in places:
        place = before + (len(tie) - 1) / 2
        for number in tie:
            scores[number] = 1.0 - place / (count - 1)
        before += len(tie)
    return scores


async def rank(
    ask: Ask, question: Callable[[Sequence[str]], str], responses: Sequence[str]
) -> list[float] | None:
    """Ask once about all responses to a prompt, and return the score of each by their ranking.

    They are shown in an order that depends on their texts only, so that the order in which they come does not
    count; equal responses are shown once and share their score.
    """
    texts = {hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(): text for text in responses}
    shown = [texts[digest] for digest in sorted(texts)]
    if len(shown) == 1:
        return [0.5] * len(responses)
    scores = read_ranking(await ask(question(shown)), len(shown))
    return None if scores is None else [scores[shown.index(text)] for text in responses]


class Criterion(NamedTuple):
    """A property that a response should have."""

    text: str
    weight: float = 1.0  # below zero for what a response must not have


def read_criteria(column: Sequence[str | Mapping[str, Any]]) -> list[Criterion]:
    """Read a row's criteria: texts, or mappings with `criterion` and `weight` (or `points`)."""
    criteria = [
        Criterion(item)
        if isinstance(item, str)
        else Criterion(str(item["criterion"]), float(item.get("weight", item.get("points", 1.0))))
        for item in column
    ]
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError(f"criteria need a weight above zero, got {criteria}")
    return criteria


def read_checklist(answer: str, criteria: Sequence[Criterion]) -> float | None:
    """Return the weight of the criteria that an answer's lines `N: yes` meet, of all weights above zero.

    A criterion without a line is not met; the score is at least 0.
    """
    said = {int(number): word.lower() == "yes" for number, word in ITEM.findall(final_answer(answer))}
    if not said.keys() & set(range(1, len(criteria) + 1)):
        return None
    met = sum(each.weight for number, each in enumerate(criteria, 1) if said.get(number, False))
    return max(0.0, met / sum(each.weight for each in criteria if each.weight > 0))
