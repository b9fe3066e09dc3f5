# SPDX-License-Identifier: Apache-2.0
"""Validate a call against the tools' schemas, with messages that the policy can act on."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from verl.agents.interface import ToolCall
from verl.utils.user_file import shorten

# Unknown keywords of a schema are not checked: the tool sees such values itself.
KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": (list, tuple),
    "object": dict,
    "null": type(None),
}
MAX_PROBLEMS = 5  # that a message names


def call_problem(schemas: Sequence[Mapping[str, Any]], call: ToolCall) -> str | None:
    """Return why a call cannot be made; None if it can."""
    if call.problem is not None:
        return call.problem
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    if call.name in by_name:
        return argument_problem(by_name[call.name], call.arguments)
    close = difflib.get_close_matches(call.name, by_name, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"There is no tool {call.name[:100]!r}{hint}; the tools are {', '.join(by_name)}"


def argument_problem(schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Return what is wrong with the arguments of a call; None if nothing is.

    Args:
        schema: That of the tool, {"type": "function", "function": {...}}.
    """
    function = schema["function"]
    parameters = function.get("parameters") or {}
    if not isinstance(arguments, dict):
        return f"{function['name']} takes an object of named arguments, got {shown(arguments)}"
    problems = list(_object_problems(parameters, arguments, "", is_closed=True))
    if not problems:
        return None
    told = "; ".join(problems[:MAX_PROBLEMS])
    return f"{function['name']} was not called: {told}. It takes {describe_parameters(parameters)}."


def describe_parameters(parameters: Mapping[str, Any]) -> str:
    """List arguments with their types, as in "box (array), label (string, optional)"."""
    required = parameters.get("required") or ()
    listed = [
        f"{name} ({kinds_text(schema)}{'' if name in required else ', optional'})"
        for name, schema in (parameters.get("properties") or {}).items()
    ]
    return ", ".join(listed) or "no arguments"


def kinds_text(schema: Mapping[str, Any]) -> str:
    """Name the types of a schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kinds_text(member) for member in schema["anyOf"]))
    return " or ".join(_kinds(schema)) or "any"


def shown(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False, default=repr), 60, 20)


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type") or []
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _problems(schema: Mapping[str, Any], value: Any, where: str) -> Iterator[str]:
    if value is None and schema.get("nullable"):
        return
    members = schema.get("anyOf") or schema.get("oneOf") or ()
    if members and all(any(_problems(member, value, where)) for member in members):
        yield f"`{where}` must be {kinds_text({'anyOf': members})}, got {shown(value)}"
    known = [kind for kind in _kinds(schema) if kind in KINDS]
    if known and not any(_is_kind(value, kind) for kind in known):
        yield f"`{where}` must be {kinds_text(schema)}, got {shown(value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"`{where}` must be one of {shown(schema['enum'])}, got {shown(value)}"
    if isinstance(value, Real) and not isinstance(value, bool):
        yield from _range_problems(schema, value, where)
    if isinstance(value, list | tuple):
        yield from _array_problems(schema, value, where)
    if isinstance(value, dict):
        yield from _object_problems(schema, value, where, is_closed=False)


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS[kind])


def _range_problems(schema: Mapping[str, Any], value: Real, where: str) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and value < low:
        yield f"`{where}` must be at least {low}, got {shown(value)}"
    if high is not None and value > high:
        yield f"`{where}` must be at most {high}, got {shown(value)}"


def _array_problems(schema: Mapping[str, Any], value: Sequence[Any], where: str) -> Iterator[str]:
    first = schema.get("prefixItems") or ()
    low = max(len(first), schema.get("minItems") or 0)
    high = schema.get("maxItems", len(first) if first and "items" not in schema else None)
    if len(value) < low or (high is not None and len(value) > high):
        size = str(low) if low == high else f"{low} to {high}" if high is not None else f"at least {low}"
        yield f"`{where}` must have {size} items, got {len(value)}"
        return
    for idx, item in enumerate(value):
        item_schema = first[idx] if idx < len(first) else schema.get("items")
        if isinstance(item_schema, Mapping):
            yield from _problems(item_schema, item, f"{where}[{idx}]")


def _object_problems(
    schema: Mapping[str, Any], value: Mapping[str, Any], where: str, *, is_closed: bool
) -> Iterator[str]:
    """Yield the problems of an object; one that `is_closed` has the properties of its schema only."""
    properties = schema.get("properties") or {}
    further = schema.get("additionalProperties", not is_closed)
    for name in schema.get("required") or ():
        if name not in value:
            yield f"`{_join(where, name)}` is missing"
    for name, item in value.items():
        if name in properties:
            yield from _problems(properties[name], item, _join(where, name))
        elif isinstance(further, Mapping):
            yield from _problems(further, item, _join(where, name))
        elif not further:
            yield f"`{_join(where, name)}` is not one of its arguments"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
