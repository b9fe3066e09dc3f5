# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Qwen3-Coder and Qwen3.5: values as text between tags, typed by the tool's schema.

Example::

    <tool_call>
    <function=zoom>
    <parameter=box>
    [0, 0, 10, 10]
    </parameter>
    </function>
    </tool_call>
"""

import re
from functools import partial

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Finder, Schemas, calls_after, malformed
from verl.agents.parsers.typed_values import typed_call

START, END = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*+<function=([^>\n]++)>\s*+")
PARAMETER = re.compile(r"<parameter=([^>\n]++)>\n?+")
# A value may contain tags; it ends where another parameter or the end of the call follows.
END_OF_VALUE = re.compile(r"\n?</parameter>\s*+(?=<parameter=|</function>)")
CLOSING = re.compile(r"</function>\s*+</tool_call>")


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_after(START, text, partial(_read, schemas, Finder(END_OF_VALUE, text)))


def _read(schemas: Schemas, ends: Finder, text: str, start: int) -> tuple[ToolCall, int]:
    function = FUNCTION.match(text, start)
    if function is None:
        return malformed(f"{START} must be followed by <function=NAME>"), start
    name, at = function[1].strip(), function.end()
    values = {}
    while (parameter := PARAMETER.match(text, at)) and (end := ends.after(parameter.end())):
        values[parameter[1].strip()] = text[parameter.end() : end.start()]
        at = end.end()
    closing = CLOSING.match(text, at)
    if closing is None:
        problem = (
            f"a call must be parameters, <parameter=NAME>VALUE</parameter>, and end with </function>{END}"
        )
        return malformed(problem, name), at
    return typed_call(schemas, name, values), closing.end()


QWEN3_CODER = CallFormat(parse, sign=r"<function=", start=START)
