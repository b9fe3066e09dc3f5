# SPDX-License-Identifier: Apache-2.0
"""Convert values written as text to the types in a tool's schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import Schemas, call_with, malformed

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Qwen3-Coder's template writes them
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def typed_call(schemas: Schemas, tool: str, values: Mapping[str, str]) -> ToolCall:
    """Return the call of a tool, malformed if a text is of none of the types of its parameter."""
    try:
        typed = {
            name: _read_value(name, text, types_of(schemas, tool, name)) for name, text in values.items()
        }
    except ValueError as error:
        return malformed(str(error), tool)
    return call_with(tool, typed)


def types_of(schemas: Schemas, tool: str, parameter: str) -> set[str]:
    """Return the JSON types of a tool's parameter; none if the schema has no such parameter."""
    for schema in schemas:
        if schema["function"]["name"] == tool:
            parameters = _mapping(schema["function"].get("parameters"))
            return _types(_mapping(parameters.get("properties")).get(parameter))
    return set()


def _types(schema: Any) -> set[str]:
    """Return the declared types; a schema that is none, such as JSON Schema's `true`, declares nothing."""
    schema = _mapping(schema)
    types = {kind for kind in _listed(schema.get("type")) if isinstance(kind, str)}
    for option in [*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))]:
        types |= _types(option)
    return types | {"null"} if schema.get("nullable") else types


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else () if value is None else (value,)


def _read_value(name: str, text: str, types: set[str]) -> Any:
    """Read a value of one of the types; without types it remains a text."""
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
