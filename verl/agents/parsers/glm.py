# SPDX-License-Identifier: Apache-2.0
"""Tool calls of GLM-4.5 and later: names and values as text between tags, typed by the tool's schema.

Example::

    <tool_call>zoom
    <arg_key>box</arg_key>
    <arg_value>[0, 0, 10, 10]</arg_value>
    </tool_call>
"""

import re
from functools import partial

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Finder, Schemas, calls_after, malformed
from verl.agents.parsers.typed_values import typed_call

START, END = "<tool_call>", "</tool_call>"
NAME = re.compile(r"\s*+([^\s<{]++)\s*+(?=<)")
KEY = re.compile(r"<arg_key>([^<]++)</arg_key>\s*+<arg_value>")
# A value may contain tags; it ends where another argument or the end of the call follows.
END_OF_VALUE = re.compile(r"</arg_value>\s*+(?=<arg_key>|</tool_call>)")


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_after(START, text, partial(_read, schemas, Finder(END_OF_VALUE, text)))


def _read(schemas: Schemas, ends: Finder, text: str, start: int) -> tuple[ToolCall, int]:
    named = NAME.match(text, start)
    if named is None:
        return malformed(f"{START} must be followed by the name of a tool"), start
    name, at = named[1], named.end()
    values = {}
    while (key := KEY.match(text, at)) and key[1].strip() and (end := ends.after(key.end())):
        values[key[1].strip()] = text[key.end() : end.start()]
        at = end.end()
    if not text.startswith(END, at):
        problem = (
            "a call must be a name and arguments, <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>, and"
            f" end with {END}"
        )
        return malformed(problem, name), at
    return typed_call(schemas, name, values), at + len(END)


GLM = CallFormat(parse, sign=r"<arg_key>", start=START)
