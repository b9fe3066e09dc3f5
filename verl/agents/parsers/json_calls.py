# SPDX-License-Identifier: Apache-2.0
"""Tool calls as JSON objects: {"name": "zoom", "arguments": {"box": [0, 0, 10, 10]}}."""

import json
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import call_with, malformed

ARGUMENTS = ("arguments", "parameters")  # names of the member, the first one found
# Models write line breaks into strings, which strict JSON refuses and every reader understands.
DECODER = json.JSONDecoder(strict=False)


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
