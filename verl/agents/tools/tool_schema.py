# SPDX-License-Identifier: Apache-2.0
"""The schema of a tool, from the type hints and the Google docstring of its function, and checks of calls.

It has the form that `transformers.utils.get_json_schema` gives it; transformers is not imported. Messages
about a call say what the policy can change.
"""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from verl.agents.interface import ToolCall
from verl.utils.user_file import shorten

BASIC = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
SECTION = re.compile(r"^\s*(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):{1,2}\s*$")
ARGUMENT = re.compile(r"\s*\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
EXAMPLE = "Args:\n    {name}: What the policy should give here."
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


def function_schema(function: Callable[..., Any], name: str, skipped: int = 0) -> dict[str, Any]:
    """Return the schema of a function, whose first `skipped` arguments the policy does not give.

    Raises:
        ValueError: An argument has no usable type hint or no description; the message begins with a verb.
    """
    text = inspect.getdoc(function) if function.__doc__ else None
    if not text or not text.strip():
        raise ValueError('has no docstring: add one, """Description of the tool for the policy."""')
    description, described = read_docstring(text)
    try:
        hints = get_type_hints(function)
    except Exception as error:
        raise ValueError(f"has a type hint that cannot be read: {error}") from error
    properties, required = {}, []
    for argument in list(inspect.signature(function).parameters.values())[skipped:]:
        properties[argument.name] = _property(argument, hints, described)
        if argument.default is argument.empty:
            required.append(argument.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description in a Google docstring, and that of each argument."""
    sections: dict[str, list[str]] = {"": []}
    section = ""
    for line in text.strip().splitlines():
        if match := SECTION.match(line):
            section = match[1]
            sections[section] = []
        else:
            sections[section].append(line)
    arguments: dict[str, str] = {}
    lines = [line for line in sections.get("Args", sections.get("Arguments", [])) if line.strip()]
    indent = min((_indent(line) for line in lines), default=0)
    last = None
    for line in lines:
        match = ARGUMENT.match(line)
        if match and _indent(line) == indent:
            last = match[1]
            arguments[last] = match[2].strip()
        elif last is not None:
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return "\n".join(sections[""]).strip(), arguments


def _property(
    argument: inspect.Parameter, hints: dict[str, Any], described: dict[str, str]
) -> dict[str, Any]:
    name = argument.name
    if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
        raise ValueError(f"takes `{argument}`, but a policy calls with named arguments: name each of them")
    if name not in hints:
        raise ValueError(f"has no type hint at argument `{name}`: write one, as in `{name}: str`")
    if not described.get(name):
        example = EXAMPLE.format(name=name)
        raise ValueError(f"does not describe argument `{name}`: add it to the docstring:\n{example}")
    schema = type_schema(hints[name], name)
    description = described[name]
    if choices := CHOICES.search(description):
        try:
            schema["enum"] = list(json.loads(choices[1]))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"lists choices of `{name}` that are not JSON: {choices[0]}; write (choices: [...])"
            ) from error
        description = description[: choices.start()].strip()
    return schema | {"description": description}


def type_schema(hint: Any, name: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint; `name` is the argument's, for errors."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in BASIC:
        return {"type": BASIC[hint]}
    if origin in (Union, UnionType):
        return _union_schema(args, name)
    if origin is Literal:
        kinds = list(dict.fromkeys(BASIC[type(value)] for value in args if type(value) in BASIC))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if origin is tuple and ... not in args:
        return {"type": "array", "prefixItems": [type_schema(item, name) for item in args]}
    if origin in (list, tuple):
        return {"type": "array", "items": type_schema(args[0], name)}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": type_schema(args[1], name)}
    shown = getattr(hint, "__name__", hint) if origin is None else hint
    raise ValueError(
        f"has the type hint `{shown}` at argument `{name}`, which JSON cannot express: use str, bool, int,"
        " float, list, tuple, dict with text as keys, Literal, and unions of these"
    )


def _union_schema(members: tuple[Any, ...], name: str) -> dict[str, Any]:
    schemas = [type_schema(member, name) for member in members if member is not NoneType]
    if len(schemas) == 1:
        union = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        kinds = sorted({schema["type"] for schema in schemas})
        union = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        union = {"anyOf": schemas}
    return union | ({"nullable": True} if NoneType in members else {})


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


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
    """Return what is wrong with the arguments of a call of the tool with a schema; None if nothing is."""
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
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is not None and value < low:
            yield f"`{where}` must be at least {low}, got {shown(value)}"
        if high is not None and value > high:
            yield f"`{where}` must be at most {high}, got {shown(value)}"
    if isinstance(value, list | tuple):
        yield from _array_problems(schema, value, where)
    if isinstance(value, dict):
        yield from _object_problems(schema, value, where, is_closed=False)


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS[kind])


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
