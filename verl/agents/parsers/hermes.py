# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Hermes, Qwen2.5 and Qwen3: a JSON object between two tags.

Example::

    <tool_call>
    {"name": "zoom", "arguments": {"box": [0, 0, 10, 10]}}
    </tool_call>
"""

import re
from functools import partial

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat, Finder, Schemas, calls_after, malformed
from verl.agents.parsers.json_calls import call_of, read_object

START, END = "<tool_call>", "</tool_call>"
TAG, CLOSING = re.compile("</?tool_call>"), re.compile(r"\s*+</tool_call>")


def parse(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_after(START, text, partial(_read, Finder(TAG, text)))


def _read(tags: Finder, text: str, start: int) -> tuple[ToolCall, int]:
    try:
        # The end tag may be part of a text in the arguments, so the object is read first.
        value, stop = read_object(text, start)
    except ValueError as error:
        tag = tags.after(start)
        stop = len(text) if tag is None else tag.start()
        return malformed(f"the text after {START} is no JSON object: {error}"), stop
    call = call_of(value)
    if call.problem is None and CLOSING.match(text, stop) is None:
        call = malformed(f"the call must end with {END}", call.name)
    return call, stop


HERMES = CallFormat(parse, sign=r"<tool_call>(?:\\n|\s)*\{\s*\\*[\"']name", start=START)
