# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Gemma 4: unquoted names, and strings between special tokens.

Example::

    <|tool_call>call:zoom{box:[0,0,10,10],label:<|"|>the door<|"|>}<tool_call|>
"""

import re
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Schemas, call_with, calls_after, malformed

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT, END_OF_THOUGHT = "<|channel>", "<channel|>"
FUNCTION = re.compile(r"\s*call:([^\s{<]+)(?=\{)")
NAME = re.compile(r"[^\s:,<>{}\[\]]+")
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
WORDS = {"true": True, "false": False, "null": None, "None": None}
SPACES = re.compile(r"\s*")


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
    if text.lstrip().startswith(THOUGHT):  # a call in thoughts is none
        text = text.partition(END_OF_THOUGHT)[2]
    return calls_after(START, text, _read)


def _read(text: str, start: int) -> tuple[ToolCall, int]:
    function = FUNCTION.match(text, start)
    if function is None:
        return malformed(f"{START} must be followed by call:NAME{{ARGUMENTS}}"), start
    name = function[1]
    try:
        arguments, at = _object(text, function.end())
    except RecursionError:
        return malformed("the arguments are nested too deeply", name), start
    except ValueError as error:
        return malformed(f"the arguments cannot be read: {error}", name), start
    if not text.startswith(END, at):
        return malformed(f"the call must end with {END}", name), at
    return call_with(name, arguments), at + len(END)


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value at a position, and the position after it."""
    if text.startswith(QUOTE, at):
        return _quoted(text, at)
    if text.startswith("{", at):
        return _object(text, at)
    if text.startswith("[", at):
        return _list(text, at)
    word = NAME.match(text, at)
    if word is not None and word[0] in WORDS:
        return WORDS[word[0]], word.end()
    if word is not None and (number := NUMBER.fullmatch(word[0])):
        is_whole = number[1] is None and number[2] is None
        return (int if is_whole else float)(word[0]), word.end()
    raise ValueError(f"expected a value, and texts between {QUOTE}, got {text[at : at + 40]!r}")


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = _after_spaces(text, at + 1)
    while not text.startswith("}", at):
        name, at = _name(text, at)
        at = _after(text, at, ":")
        members[name], at = _value(text, at)
        at = _next(text, at, "}")
    return members, at + 1


def _list(text: str, at: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _after_spaces(text, at + 1)
    while not text.startswith("]", at):
        value, at = _value(text, at)
        values.append(value)
        at = _next(text, at, "]")
    return values, at + 1


def _name(text: str, at: int) -> tuple[str, int]:
    if text.startswith(QUOTE, at):
        return _quoted(text, at)
    name = NAME.match(text, at)
    if name is None:
        raise ValueError(f"expected a name, got {text[at : at + 40]!r}")
    return name[0], name.end()


def _quoted(text: str, at: int) -> tuple[str, int]:
    start = at + len(QUOTE)
    stop = text.find(QUOTE, start)
    if stop < 0:
        raise ValueError(f"a text must end with {QUOTE}")
    return text[start:stop], stop + len(QUOTE)


def _next(text: str, at: int, end: str) -> int:
    """Return the position of the next member, or of the end of all."""
    at = _after_spaces(text, at)
    return at if text.startswith(end, at) else _after(text, at, ",")


def _after(text: str, at: int, sign: str) -> int:
    at = _after_spaces(text, at)
    if not text.startswith(sign, at):
        raise ValueError(f"expected {sign!r}, got {text[at : at + 40]!r}")
    return _after_spaces(text, at + 1)


def _after_spaces(text: str, at: int) -> int:
    found = SPACES.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


GEMMA4 = CallFormat(parse, sign=r"<\|tool_call>call:", start=START)
