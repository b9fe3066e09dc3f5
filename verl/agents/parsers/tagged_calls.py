# SPDX-License-Identifier: Apache-2.0
"""Tool calls with values as text between tags, which are converted to the types in the tool's schema.

Qwen3-Coder and Qwen3.5, for example::

    <tool_call>
    <function=zoom>
    <parameter=box>
    [0, 0, 10, 10]
    </parameter>
    </function>
    </tool_call>

GLM-4.5 and later::

    <tool_call>zoom
    <arg_key>box</arg_key>
    <arg_value>[0, 0, 10, 10]</arg_value>
    </tool_call>
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Finder, Schemas, call_with, calls_after, malformed

START, END = "<tool_call>", "</tool_call>"
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Qwen3-Coder's template writes them
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


class Tags(NamedTuple):
    """The tags around the names and values of a call, after its start tag."""

    name: re.Pattern[str]  # of the tool, its first group
    key: re.Pattern[str]  # before a value, with the argument's name
    # A value may contain tags; it ends where another argument or the end of the call follows.
    end_of_value: re.Pattern[str]
    closing: re.Pattern[str]
    called: str  # what follows the start tag, for errors
    form: str  # of the rest


QWEN3_CODER_TAGS = Tags(
    name=re.compile(r"\s*+<function=([^>\n]++)>\s*+"),
    key=re.compile(r"<parameter=([^>\n]++)>\n?+"),
    end_of_value=re.compile(r"\n?</parameter>\s*+(?=<parameter=|</function>)"),
    closing=re.compile(r"</function>\s*+</tool_call>"),
    called="<function=NAME>",
    form=f"parameters, <parameter=NAME>VALUE</parameter>, and end with </function>{END}",
)
GLM_TAGS = Tags(
    name=re.compile(r"\s*+([^\s<{]++)\s*+(?=<)"),
    key=re.compile(r"<arg_key>(?=\s*+[^\s<])([^<]++)</arg_key>\s*+<arg_value>"),
    end_of_value=re.compile(r"</arg_value>\s*+(?=<arg_key>|</tool_call>)"),
    closing=re.compile(END),
    called="the name of a tool",
    form=f"a name and arguments, <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>, and end with {END}",
)


def parse(tags: Tags, text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_after(START, text, partial(_read, tags, schemas, Finder(tags.end_of_value, text)))


def _read(tags: Tags, schemas: Schemas, ends: Finder, text: str, start: int) -> tuple[ToolCall, int]:
    named = tags.name.match(text, start)
    if named is None:
        return malformed(f"{START} must be followed by {tags.called}"), start
    name, at = named[1].strip(), named.end()
    values = {}
    while (key := tags.key.match(text, at)) and (end := ends.after(key.end())):
        values[key[1].strip()] = text[key.end() : end.start()]
        at = end.end()
    closing = tags.closing.match(text, at)
    if closing is None:
        return malformed(f"a call must be {tags.form}", name), at
    return typed_call(schemas, name, values), closing.end()


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


QWEN3_CODER = CallFormat(partial(parse, QWEN3_CODER_TAGS), sign=r"<function=", start=START)
GLM = CallFormat(partial(parse, GLM_TAGS), sign=r"<arg_key>", start=START)
