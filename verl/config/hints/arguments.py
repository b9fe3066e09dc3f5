# SPDX-License-Identifier: Apache-2.0
"""Lists and mappings on the command line: how to write them, and arguments that a shell has divided."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, get_origin

CLOSING = {"[": "]", "{": "}"}


def whole_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each argument, and whether it is one that the shell has divided at spaces.

    `x={a: 1}` without quotes arrives as `x={a:` and `1}`.
    """
    index = 0
    while index < len(arguments):
        argument, index = arguments[index], index + 1
        if not _is_open(argument):
            yield argument, False
            continue
        for end in range(index + 1, len(arguments) + 1):
            joined = " ".join([argument, *arguments[index:end]])
            if "=" in arguments[end - 1]:
                break  # the next option
            if not _is_open(joined):
                argument, index = joined, end
                break
        yield argument, " " in argument and argument not in arguments


def _is_open(argument: str) -> bool:
    value = argument.partition("=")[2]
    return value[:1] in CLOSING and value.count(value[0]) > value.count(CLOSING[value[0]])


def quoted(argument: str) -> str:
    """Return an argument as a shell takes it whole."""
    key, _, value = argument.partition("=")
    return f"{key}='{value}'" if "'" not in value else f'{key}="{value}"'


def dashless(argument: str, following: str = "") -> str:
    """Explain how to write an option given as `--data.seed=1` or `--data.seed 1`; empty for others."""
    key, equals, value = argument.lstrip("-").partition("=")
    value = value if equals else following
    return f": options have no dashes: {key}={value}" if "." in key and value else ""


def spelling(key: str, kinds: Sequence[Any], value: Any) -> str:
    """Say how to write a list or mapping that was given as plain text; `kinds` are the option's types."""
    origins = {get_origin(kind) for kind in kinds}
    if isinstance(value, tuple | list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        return ""
    written = as_mapping(value) if dict in origins else as_list(value) if {list, tuple} & origins else None
    return f"; write {quoted(f'{key}={written}')}" if written else ""


def as_list(text: str) -> str | None:
    """Return a list without brackets, `a,b`, as JSON; None if the text is none."""
    items = [item.strip() for item in text.strip("()").split(",")]
    if len(items) < 2 or not all(items):
        return None
    return "[" + ",".join(map(_json, items)) + "]"


def as_mapping(text: str) -> str | None:
    """Return a mapping without braces, `a:1`, as JSON; None if the text is none."""
    pairs = [item.split(":", 1) for item in text.split(",")]
    if not all(len(pair) == 2 and pair[0].strip() and pair[1].strip() for pair in pairs):
        return None
    return "{" + ",".join(f"{json.dumps(name.strip())}:{_json(value.strip())}" for name, value in pairs) + "}"


def _json(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return json.dumps(text)
    return text
