# SPDX-License-Identifier: Apache-2.0
"""The schema of a tool, from the type hints and the Google docstring of its function.

It has the form that `transformers.utils.get_json_schema` gives it; transformers is not imported.
"""

import inspect
import json
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
