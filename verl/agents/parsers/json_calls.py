# SPDX-License-Identifier: Apache-2.0
"""Tool calls as JSON objects: between two tags (Hermes, Qwen2.5 and Qwen3), or as the whole turn (Llama 3).

Examples::

    <tool_call>
    {"name": "zoom", "arguments": {"box": [0, 0, 10, 10]}}
    </tool_call>

    {"name": "zoom", "parameters": {"box": [0, 0, 10, 10]}}
"""

import json
import re
from functools import partial
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import (
    MAX_CALLS,
    CallFormat,
    Finder,
    Schemas,
    call_with,
    calls_after,
    malformed,
)

START, END = "<tool_call>", "</tool_call>"
TAG, CLOSING = re.compile("</?tool_call>"), re.compile(r"\s*+</tool_call>")
PREFIX = "<|python_tag|>"  # before calls of Llama 3.1
FENCE = "```"
BETWEEN = re.compile(r"[ \n\r\t;,]*+")
ARGUMENTS = ("arguments", "parameters")  # names of the member, the first one found
NAME, GIVEN = re.compile(r'"name"\s*+:'), re.compile(rf'"(?:{"|".join(ARGUMENTS)})"\s*+:')
# Models write line breaks into strings, which strict JSON refuses and every reader understands.
DECODER = json.JSONDecoder(strict=False)


def parse_tagged(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_after(START, text, partial(_read, Finder(TAG, text)))


def _read(tags: Finder, text: str, start: int) -> tuple[ToolCall, int]:
    try:
        # The end tag may be part of a text in the arguments, so the object is read first.
        value, stop = read_object(text, start)
    except ValueError as error:
        tag = tags.after(start)
        stop = len(text) if tag is None else tag.start()
        return malformed(f"the text after {START} is no JSON object: {error}"), stop
    call = call_of(value)
    if call.problem is None and CLOSING.match(text, stop) is None:
        call = malformed(f"the call must end with {END}", call.name)
    return call, stop


def parse_whole(text: str, schemas: Schemas) -> list[ToolCall]:
    body = text.strip().removeprefix(PREFIX).strip()
    if len(body) >= 2 * len(FENCE) and body.startswith(FENCE) and body.endswith(FENCE):
        body = body[len(FENCE) : -len(FENCE)].removeprefix("json").strip()
    values: list[Any] = []
    at = 0
    while body.startswith(("{", "["), at):
        try:
            value, at = read_object(body, at)
        except ValueError as error:
            # Other texts may start with a bracket.
            return [malformed(f"the call is no JSON object: {error}")] if _looks_like_a_call(body) else []
        values += value if isinstance(value, list) else [value]
        if len(values) > MAX_CALLS:
            return [malformed(f"a turn may have at most {MAX_CALLS} calls")]
        between = BETWEEN.match(body, at)
        at = at if between is None else between.end()
    return [call_of(value) for value in values] if values and all(map(_is_call, values)) else []


def _looks_like_a_call(body: str) -> bool:
    name = NAME.search(body)
    return name is not None and GIVEN.search(body, name.end()) is not None


def _is_call(value: Any) -> bool:
    """Return whether a value is a call and not an answer in JSON."""
    return isinstance(value, dict) and "name" in value and any(key in value for key in ARGUMENTS)


def read_object(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start`, after spaces, and its end.

    Raises:
        ValueError: There is no JSON value, or Python cannot hold it.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start + 1} of the call") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def call_of(value: Any) -> ToolCall:
    """Return the call that a JSON value is."""
    if not isinstance(value, dict):
        return malformed(f"a call must be an object with `name` and `arguments`, got {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return malformed("a call must have a `name`, which is a text")
    arguments = next((value[key] for key in ARGUMENTS if value.get(key) is not None), {})
    if isinstance(arguments, str):  # some models write the object as a text
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return malformed("`arguments` must be an object, got a text that is no JSON", name)
    if not isinstance(arguments, dict):
        return malformed(f"`arguments` must be an object, got {_kind(arguments)}", name)
    return call_with(name, arguments)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


HERMES = CallFormat(parse_tagged, sign=r"<tool_call>(?:\\n|\s)*\{\s*\\*[\"']name", start=START)
PLAIN_JSON = CallFormat(parse_whole, sign=r"\{\\*[\"']name\\*[\"']:[^{}]*\\*[\"']parameters\\*[\"']")
