# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Gemma 4: unquoted names, and strings between special tokens.

Example::

    <|tool_call>call:zoom{box:[0,0,10,10],label:<|"|>the door<|"|>}<tool_call|>
"""

import re
from collections.abc import Iterator
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Schemas, call_with, calls_after, malformed

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT, END_OF_THOUGHT = "<|channel>", "<channel|>"
FUNCTION = re.compile(r"\s*call:([^\s{<]+)(?=\{)")
NAME = re.compile(r"[^\s:,<>{}\[\]]+")
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
WORDS = {"true": True, "false": False, "null": None, "None": None}


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
    if text.lstrip().startswith(THOUGHT):  # a call in thoughts is none
        text = text.partition(END_OF_THOUGHT)[2]
    return calls_after(START, text, _read)


def _read(text: str, start: int) -> tuple[ToolCall, int]:
    function = FUNCTION.match(text, start)
    if function is None:
        return malformed(f"{START} must be followed by call:NAME{{ARGUMENTS}}"), start
    name, reader = function[1], Reader(text, function.end())
    try:
        arguments = reader.value()
    except RecursionError:
        return malformed("the arguments are nested too deeply", name), start
    except ValueError as error:
        return malformed(f"the arguments cannot be read: {error}", name), start
    if not text.startswith(END, reader.at):
        return malformed(f"the call must end with {END}", name), reader.at
    return call_with(name, arguments), reader.at + len(END)


class Reader:
    """Reads a value at the position `at`, which then is the end of the value."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def value(self) -> Any:
        if self._passes(QUOTE):
            return self._quoted()
        if self._passes("{"):
            return {self._name(): self.value() for _ in self._members("}")}
        if self._passes("["):
            return [self.value() for _ in self._members("]")]
        word = NAME.match(self.text, self.at)
        number = None if word is None else NUMBER.fullmatch(word[0])
        if word is None or (number is None and word[0] not in WORDS):
            raise self._expected(f"a value, and texts between {QUOTE}")
        self.at = word.end()
        if number is None:
            return WORDS[word[0]]
        return int(word[0]) if number[1] is None and number[2] is None else float(word[0])

    def _members(self, end: str) -> Iterator[None]:
        """Yield at each member of an object or a list, and go past the end of all."""
        while not self._passes(end):
            yield
            if self._passes(end):
                return
            self._pass(",")

    def _name(self) -> str:
        if self._passes(QUOTE):
            name = self._quoted()
        elif (word := NAME.match(self.text, self.at)) is not None:
            name, self.at = word[0], word.end()
        else:
            raise self._expected("a name")
        self._pass(":")
        return name

    def _quoted(self) -> str:
        start, stop = self.at, self.text.find(QUOTE, self.at)
        if stop < 0:
            raise ValueError(f"a text must end with {QUOTE}")
        self.at = stop + len(QUOTE)
        return self.text[start:stop]

    def _pass(self, sign: str) -> None:
        if not self._passes(sign):
            raise self._expected(repr(sign))

    def _passes(self, sign: str) -> bool:
        """Go past spaces and then a sign; return whether it was there."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        is_there = self.text.startswith(sign, self.at)
        self.at += is_there * len(sign)
        return is_there

    def _expected(self, what: str) -> ValueError:
        return ValueError(f"expected {what}, got {self.text[self.at : self.at + 40]!r}")


GEMMA4 = CallFormat(parse, sign=r"<\|tool_call>call:", start=START)
