# SPDX-License-Identifier: Apache-2.0
"""Remedies for keys that are no options: another program's name for an option, or a misspelled one.

Names are compared word by word and without their sections, because long common sections make any two keys
look alike. A wrong suggestion costs more than none, so a weak match gives none.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
QUOTED_OPTION = re.compile(r"`((?:data|algorithm|worker|trainer)(?:\.\w+)+)")
ANY_NAME = "NAME"  # in an option's key: of a section that the user names
MAX_KEY = 200  # characters of a key that may be a misspelled one
MIN_WORD = 0.75  # similarity of two words, below which they are different words
MIN_PREFIX = 3  # letters of an abbreviated word, as in `freq`
MIN_JOINED = 0.9  # similarity of names whose words are divided differently: `savefreq`
ABBREVIATED, SHORTENED = 0.9, 0.75  # similarity if a word is abbreviated, or some words are missing
MIN_ELSEWHERE = 0.85  # similarity of a name in another section
MIN_SECTION = 0.5  # similarity of sections that a name with several meanings needs
GENERIC = {  # names that mean something else in every section
    *("path", "name", "enabled", "update", "beta", "coef", "batch_size", "num_workers", "strategy", "dtype")
}


class OtherName(NamedTuple):
    """An entry of `other_names.yaml`."""

    program: str
    options: tuple[str, ...]  # ends of keys; empty: nothing here has its effect
    note: str


class Suggestion(NamedTuple):
    """Remedy for an unknown key."""

    option: str | None  # that was meant
    text: str


def suggest(key: str, options: Sequence[str]) -> Suggestion | None:
    """Return the remedy for an unknown key, or None if nothing is likely enough."""
    if len(key) > MAX_KEY:
        return None
    options = list(dict.fromkeys(_named_as_in(key, options)))
    nearest, score = _nearest(key, options)
    if nearest is not None and score > 1 + SHORTENED:  # a slip in an option of this very section
        return Suggestion(nearest, f"did you mean `{nearest}`?")
    for name in (".".join(key.split(".")[-2:]), key.rpartition(".")[2]):
        entry = other_names().get(name)
        if entry is not None and _is_true_for(options, entry):
            found = _in_nearest_section(key, entry.options, options)
            if found is not None or not entry.options:
                return Suggestion(found, _sentence(name, entry, found))
    return None if nearest is None else Suggestion(nearest, f"did you mean `{nearest}`?")


def _named_as_in(key: str, options: Sequence[str]) -> Iterator[str]:
    """Yield the options; those in a section `HOLDER.NAME` only for a key with `HOLDER`, and with its name."""
    names = key.split(".")
    for option in options:
        holder, is_named, inner = option.partition(f".{ANY_NAME}.")
        if not is_named:
            yield option
        elif written := difflib.get_close_matches(holder.rpartition(".")[2], names[:-2], 1, MIN_WORD):
            yield f"{holder}.{names[names.index(written[0]) + 1]}.{inner}"


@cache
def other_names() -> dict[str, OtherName]:
    """Names of options in other programs."""
    tables = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    return {name: _entry(program, text) for program, table in tables.items() for name, text in table.items()}


def _entry(program: str, text: str) -> OtherName:
    options, _, note = text.partition("; ")
    return OtherName(program, () if options == "none" else tuple(options.split(" | ")), note)


def _sentence(name: str, entry: OtherName, option: str | None) -> str:
    name = f"{entry.program}'s `{name}`"
    if option is None:
        return f"{name} has no counterpart here: {entry.note}"
    return f"{name} is `{option}` here" + (entry.note and f": {entry.note}")


def _is_true_for(options: Sequence[str], entry: OtherName) -> bool:
    """Return whether the run has every option, section and key of a mapping that the remark quotes."""
    return all(
        any(f"{name}.".startswith(f"{option}.") or option.startswith(f"{name}.") for option in options)
        for name in QUOTED_OPTION.findall(entry.note)
    )


def _in_nearest_section(key: str, ends: Sequence[str], options: Sequence[str]) -> str | None:
    for end in ends:
        found = [option for option in options if option == end or option.endswith(f".{end}")]
        if found:
            return max(found, key=lambda option: _common_sections(key, option))  # the first of the best
    return None


def _common_sections(first: str, second: str) -> int:
    pairs = list(zip(first.split(".")[:-1], second.split(".")[:-1], strict=False))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))


def _nearest(key: str, options: Sequence[str]) -> tuple[str | None, float]:
    """Return the most similar option and its score: similarity of the name plus that of the section."""
    section, _, name = key.rpartition(".")
    best, best_score, is_unique = None, 0.0, True
    for option in options:
        its_section, _, its_name = option.rpartition(".")
        by_name = _name_similarity(name, its_name)
        if not by_name:
            continue
        by_section = _section_similarity(section, its_section)
        if by_section < (1.0 if by_name < MIN_ELSEWHERE else MIN_SECTION if its_name in GENERIC else 0.0):
            continue
        if by_name == SHORTENED:
            is_unique = best_score != by_name + by_section
        if by_name + by_section > best_score:
            best, best_score = option, by_name + by_section
    is_guess = best_score == 1 + SHORTENED
    return (best, best_score) if is_unique or not is_guess else (None, 0.0)


def _section_similarity(written: str, section: str) -> float:
    """Share of a section's words in the written one; exactly 1 if only spelling differs."""
    names, its_names = written.split(".") if written else [], section.split(".") if section else []
    if len(names) == len(its_names):
        alike = [_word_similarity(one, other) for one, other in zip(names, its_names, strict=True)]
        if all(similarity >= MIN_WORD for similarity in alike):
            return 1.0
    common = sum(
        any(_word_similarity(name, its_name) >= MIN_WORD for its_name in its_names) for name in names
    )
    return 0.9 * common / max(len(names), len(its_names), 1)


@cache
def _name_similarity(written: str, name: str) -> float:
    """Similarity of two names from 0, different, to 1, equal."""
    if written == name:
        return 1.0
    words, its_words = written.lower().split("_"), name.split("_")
    if len(words) == len(its_words):
        alike = [_word_similarity(one, other) for one, other in zip(words, its_words, strict=True)]
        return 0.98 * sum(alike) / len(alike) if min(alike) >= MIN_WORD else 0.0
    joined = _ratio("".join(words), "".join(its_words))
    if joined >= MIN_JOINED:
        return joined
    fewer, more = sorted((set(words), set(its_words)), key=len)
    return SHORTENED if len(fewer) > 1 and fewer < more else 0.0


@cache
def _word_similarity(written: str, word: str) -> float:
    if written == word:
        return 1.0
    shorter, longer = sorted((written, word), key=len)
    if len(shorter) >= MIN_PREFIX and longer.startswith(shorter):
        return ABBREVIATED
    return _ratio(written, word)


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()
