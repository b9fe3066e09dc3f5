# SPDX-License-Identifier: Apache-2.0
"""Calls of Qwen3-Coder and Qwen3.5: values as text between tags, typed by the tool's schema.

Example::

    <tool_call>
    <function=zoom>
    <parameter=box>
    [0, 0, 10, 10]
    </parameter>
    </function>
    </tool_call>
"""

import json
import re
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Schemas, malformed

START, END = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
# A value may contain tags; it ends where another parameter or the end of the call follows.
PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL
)
CLOSING = re.compile(r"</function>\s*</tool_call>")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Qwen3-Coder's template writes them
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
    calls = []
    at = text.find(START)
    while at >= 0:
        call, at = _read(text, at + len(START), schemas)
        calls.append(call)
        at = text.find(START, at)
    return calls


def _read(text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int]:
    """Return the call after a start tag, and where to look for the next one."""
    function = FUNCTION.match(text, start)
    if function is None:
        return malformed(f"{START} must be followed by <function=NAME>"), start
    name, at = function[1].strip(), function.end()
    values = {}
    while parameter := PARAMETER.match(text, at):
        values[parameter[1].strip()] = parameter[2]
        at = parameter.end()
    closing = CLOSING.match(text, at)
    if closing is None:
        problem = (
            f"a call must be parameters, <parameter=NAME>VALUE</parameter>, and end with </function>{END}"
        )
        return malformed(problem, name), at
    try:
        arguments = {
            key: read_value(key, value, types_of(schemas, name, key)) for key, value in values.items()
        }
    except ValueError as error:
        return malformed(str(error), name), closing.end()
    return ToolCall(name, arguments), closing.end()


def types_of(schemas: Schemas, tool: str, parameter: str) -> set[str]:
    """Return the JSON types of a tool's parameter; none if the schema has no such parameter."""
    for schema in schemas:
        if schema["function"]["name"] == tool:
            properties = schema["function"].get("parameters", {}).get("properties", {})
            return _types(properties.get(parameter, {}))
    return set()


def _types(schema: dict[str, Any]) -> set[str]:
    declared = schema.get("type", [])
    types = {declared} if isinstance(declared, str) else set(declared)
    for option in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        types |= _types(option)
    return types | {"null"} if schema.get("nullable") else types


def read_value(name: str, text: str, types: set[str]) -> Any:
    """Read a value of one of the types; without types it remains a text.

    Raises:
        ValueError: The text is of none of them.
    """
    if types <= {"string"}:
        return text
    word = text.strip()
    try:
        value: Any = json.loads(PYTHON_WORDS.get(word, word))
    except (ValueError, RecursionError):
        value = text
    kind = TYPES.get(type(value), "null")
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return int(value)
    if "string" in types:
        return text
    raise ValueError(f"`{name}` must be of the type {' or '.join(sorted(types))}, got {text[:80]!r}")


QWEN3_CODER = CallFormat(parse, sign=r"<function=", start=START)
