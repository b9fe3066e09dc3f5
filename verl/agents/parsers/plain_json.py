# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3: the turn is one or more JSON objects.

Example::

    {"name": "zoom", "parameters": {"box": [0, 0, 10, 10]}}
"""

import re
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import MAX_CALLS, CallFormat, Schemas, malformed
from verl.agents.parsers.json_calls import ARGUMENTS, call_of, read_object

PREFIX = "<|python_tag|>"  # before calls of Llama 3.1
FENCE = "```"
BETWEEN = re.compile(r"[ \n\r\t;,]*+")
NAME, GIVEN = re.compile(r'"name"\s*+:'), re.compile(rf'"(?:{"|".join(ARGUMENTS)})"\s*+:')


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
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


PLAIN_JSON = CallFormat(parse, sign=r"\{\\*[\"']name\\*[\"']:[^{}]*\\*[\"']parameters\\*[\"']")
