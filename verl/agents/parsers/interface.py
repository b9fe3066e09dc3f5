# SPDX-License-Identifier: Apache-2.0
"""The ways in which models write calls; `registry.py` lists them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from verl.agents.interface import MAX_DEPTH, ToolCall, is_too_deep

Schemas = Sequence[Mapping[str, Any]]  # of the tools, as `Tool.schema`
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


class CallFormat(NamedTuple):
    """A way of writing calls."""

    # Reads all calls of a turn's text; one that cannot be read has a `problem`.
    parse: Callable[[str, Schemas], list[ToolCall]]
    sign: str  # regular expression found in chat templates that write calls this way
    start: str = ""  # begins a call; empty if a turn with calls is nothing else


NO_CALLS = CallFormat(lambda _text, _schemas: [], "")  # of a policy that has no tools


def calls_after(start: str, text: str, read: Callable[[str, int], tuple[ToolCall, int]]) -> list[ToolCall]:
    """Read a call after each start tag.

    Args:
        read: Returns the call at a position, and where to look for the next start tag.
    """
    calls = []
    at = text.find(start)
    while at >= 0:
        call, at = read(text, at + len(start))
        calls.append(call)
        at = text.find(start, at)
    return calls


def call_with(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a call, malformed if other code could not recurse into its arguments."""
    if is_too_deep(arguments):
        return malformed(f"the arguments are nested too deeply: at most {MAX_DEPTH} levels are read", name)
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
