# SPDX-License-Identifier: Apache-2.0
"""From a value in YAML or on the command line to the type an option declares, and back to text.

Types an option may have: `bool`, `int`, `float`, `str`, `list[...]`, `tuple[...]`, `dict[str, Any]`, `Any`,
and unions of them with `None` and with words (`Literal["auto"]`). A conversion succeeds or raises a
ValueError that starts with "must be".
"""

import json
import math
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

NULL_WORDS = ("null", "None", "~", "")
PLAIN_YAML_TEXT = re.compile(r"([A-Za-z_/]|\.(?=[A-Za-z./]))[\w./@\-]*(:[\w./@\-]+)*")
REFERENCE = re.compile(r"(\\*)\$\{")  # how a reference to another option begins, or its escaped form
MAX_SHOWN = 200  # characters of a value that an error quotes
YAML_WORDS = {"null", "none", "true", "false", "yes", "no", "on", "off", "y", "n", ".inf", ".nan"}


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`, or raise a ValueError saying what the type is."""
    members = members_of(hint)
    if value is None or (value in NULL_WORDS if isinstance(value, str) and str not in members else False):
        if type(None) in members or hint is Any:
            return None
        raise ValueError(f"must be {describe(hint)}, got {show(value)}")
    # `str` accepts any scalar, so the stricter members of a union are asked first.
    for member in sorted(members, key=lambda kind: kind is str):
        if member is not type(None):
            matches, converted = _convert_one(value, member)
            if matches:
                return converted
    raise ValueError(f"must be {describe(hint)}, got {show(value)}")


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """Return the type in words: "an integer or null"."""
    return " or ".join(_describe_one(member) for member in members_of(hint))


def show(value: Any) -> str:
    """Return a value as an error message quotes it; of a long one the beginning."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def yaml_text(value: Any) -> str:
    """Return a value as YAML on one line; reading it back gives the same value."""
    if isinstance(value, float):
        return _yaml_float(value)
    if isinstance(value, str):
        is_plain = PLAIN_YAML_TEXT.fullmatch(value) and value.lower() not in YAML_WORDS
        return value if is_plain else _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_text(key)}: {yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_text(item) for item in value) + "]"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """Return a text in quotes; unlike JSON, YAML has one escape for a character beyond the first 65,536."""
    literal = REFERENCE.sub(lambda match: 2 * match[1] + "\\${", text)
    escaped = (json.dumps(char)[1:-1] if char < "\x7f" else f"\\U{ord(char):08x}" for char in literal)
    return '"' + "".join(escaped) + '"'


def _yaml_float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, _, exponent = repr(value).partition("e")
    if not exponent:
        return mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}"


def _describe_one(hint: Any) -> str:
    if get_origin(hint) in (list, tuple):
        items = [item for item in get_args(hint) if item is not Ellipsis]
        if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
            return f"a list of {len(items)} items, each {describe(items[0])}"
        return f"a list, each item {describe(items[0])}"
    if get_origin(hint) is dict:
        return "a mapping"
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}
    return names.get(hint, "any value")


def _convert_one(value: Any, hint: Any) -> tuple[bool, Any]:
    """Return whether `value` can be read as `hint`, and what it is then."""
    if hint is Any:
        return True, value
    origin = get_origin(hint)
    if origin is dict or hint is dict:
        return isinstance(value, dict), value
    if origin in (list, tuple):
        return _convert_items(value, origin, get_args(hint))
    if origin is Literal:
        return value in get_args(hint), value
    return {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}[hint](value)


def _convert_items(value: Any, origin: type, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    if isinstance(value, str) and Ellipsis in arguments:
        value = [value]  # `trainer.logger=console` is a list of one
    if not isinstance(value, list | tuple):
        return False, None
    if origin is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            return False, None
        pairs = [_convert_one(item, kind) for item, kind in zip(value, arguments, strict=True)]
    else:
        pairs = [_convert_one(item, arguments[0]) for item in value]
    return all(matches for matches, _ in pairs), origin(item for _, item in pairs)


def _as_bool(value: Any) -> tuple[bool, Any]:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return True, value.lower() == "true"
    return isinstance(value, bool) or value in (0, 1), bool(value)


def _as_int(value: Any) -> tuple[bool, Any]:
    matches, number = _as_float(value)
    return (
        (True, int(value) if isinstance(value, int) else int(number))
        if matches and number.is_integer()
        else (False, None)
    )


def _as_float(value: Any) -> tuple[bool, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False, None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # an integer beyond the range of a float
        return False, None
    return math.isfinite(number), number


def _as_str(value: Any) -> tuple[bool, Any]:
    if isinstance(value, str):
        return True, value
    return isinstance(value, int | float) and not isinstance(value, bool), str(value)
