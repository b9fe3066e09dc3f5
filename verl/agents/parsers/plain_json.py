# SPDX-License-Identifier: Apache-2.0
"""Calls of Llama 3: the turn is a JSON object, or several.

Example::

    {"name": "zoom", "parameters": {"box": [0, 0, 10, 10]}}
"""

import re
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Schemas, malformed
from verl.agents.parsers.json_calls import ARGUMENTS, call_of, read_object

PREFIX = "<|python_tag|>"  # before calls of Llama 3.1
FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
BETWEEN = " \n\r\t;,"
LOOKS_LIKE_A_CALL = re.compile(rf'"name"\s*:.*"(?:{"|".join(ARGUMENTS)})"\s*:', re.DOTALL)


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
    body = text.strip().removeprefix(PREFIX).strip()
    fenced = FENCED.fullmatch(body)
    body = fenced[1] if fenced else body
    values: list[Any] = []
    at = 0
    while body.startswith(("{", "["), at):
        try:
            value, at = read_object(body, at)
        except ValueError as error:
            # Other texts may start with a bracket.
            return (
                [malformed(f"the call is no JSON object: {error}")] if LOOKS_LIKE_A_CALL.search(body) else []
            )
        values += value if isinstance(value, list) else [value]
        at += len(body[at:]) - len(body[at:].lstrip(BETWEEN))
    return [call_of(value) for value in values] if values and all(map(_is_call, values)) else []


def _is_call(value: Any) -> bool:
    """Return whether a value is a call and not an answer in JSON."""
    return isinstance(value, dict) and "name" in value and any(key in value for key in ARGUMENTS)


PLAIN_JSON = CallFormat(parse, sign=r"\{\\*[\"']name\\*[\"']:[^{}]*\\*[\"']parameters\\*[\"']")
