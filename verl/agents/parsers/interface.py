# SPDX-License-Identifier: Apache-2.0
"""Interface of the formats in which models write tool calls; `registry.py` lists them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from verl.agents.interface import ToolCall, unfit_part

Schemas = Sequence[Mapping[str, Any]]  # of tools: {"type": "function", "function": {"name": ...}}
MAX_CALLS = 128  # of a turn: each costs time, whether it can be read or not
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


class CallFormat(NamedTuple):
    """A way of writing calls."""

    # Reads all calls of a turn's text; one that cannot be read has a `problem`.
    parse: Callable[[str, Schemas], list[ToolCall]]
    sign: str  # regular expression found in chat templates that write calls this way
    start: str = ""  # begins a call; empty if a turn with calls is nothing else


NO_CALLS = CallFormat(lambda _text, _schemas: [], "")  # of a policy that has no tools


class Finder:
    """Finds a pattern in a text from positions that only grow: all of them together read the text once."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._pattern, self._text = pattern, text
        self._next = pattern.search(text)

    def after(self, at: int) -> re.Match[str] | None:
        if self._next is not None and self._next.start() < at:
            self._next = self._pattern.search(self._text, at)
        return self._next


def calls_after(start: str, text: str, read: Callable[[str, int], tuple[ToolCall, int]]) -> list[ToolCall]:
    """Read a call after each start tag, of `MAX_CALLS` at most.

    `read` returns the call at a position, and where to look for the next start tag.
    """
    calls = []
    at = text.find(start)
    while at >= 0:
        if len(calls) == MAX_CALLS:
            return [*calls, malformed(f"a turn may have at most {MAX_CALLS} calls")]
        call, at = read(text, at + len(start))
        calls.append(call)
        at = text.find(start, at)
    return calls


def call_with(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a call, malformed if other code could not recurse into its arguments."""
    if unfit := unfit_part(arguments):
        return malformed(f"the arguments have {unfit}", name)
    return ToolCall(name, arguments)


def malformed(problem: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, problem)


def without_thought(text: str) -> str:
    """Return a turn's text after the thoughts that it starts with; a call in thoughts is none."""
    if not text.lstrip().startswith(THOUGHT):
        return text
    return text.partition(END_OF_THOUGHT)[2]


def text_before_calls(form: CallFormat, text: str) -> str:
    """Return the text of a turn with calls up to the first of them."""
    after = without_thought(text)
    thought = len(text) - len(after)
    return text[: thought + max(0, after.find(form.start) if form.start else 0)]
