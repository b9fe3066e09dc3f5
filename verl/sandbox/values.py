# SPDX-License-Identifier: Apache-2.0
"""Python values as text. Equal values have equal text, and only they do.

So a judge compares the text that a program wrote with the text of the expected value, and parses nothing.
"""

import json
import os
from collections.abc import Mapping, Set
from contextlib import suppress
from numbers import Number
from typing import Any


def to_text(value: Any, *, as_json: bool = False) -> str:
    """Encode numbers, text, arrays and containers of them; tuples as lists if `as_json`.

    A value of any other type equals nothing. NaN equals NaN, so that a test can expect it.
    """
    try:
        return _text(value, "[]" if as_json else "()")
    except RecursionError as error:
        raise ValueError("the value contains itself or is nested too deeply") from error


def _text(value: Any, tuple_brackets: str) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes({bytes(value).hex()})"
    if isinstance(value, list | tuple):
        left, right = tuple_brackets if isinstance(value, tuple) else "[]"
        return left + ", ".join([_text(item, tuple_brackets) for item in value]) + right
    if isinstance(value, Set):  # also views of a dictionary
        return f"set({', '.join(sorted([_text(item, tuple_brackets) for item in value]))})"
    if isinstance(value, Mapping):
        items = [
            f"{_text(key, tuple_brackets)}: {_text(item, tuple_brackets)}" for key, item in value.items()
        ]
        return f"{{{', '.join(sorted(items))}}}"
    if hasattr(value, "tolist"):  # arrays and scalars of numpy
        return _text(value.tolist(), tuple_brackets)
    return _number(value) if isinstance(value, Number) else _unequal(value)


def _number(value: Any) -> str:
    """Encode equal numbers of all types alike."""
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return int.__repr__(int(value)) if value.is_integer() else float.__repr__(value)
    if isinstance(value, complex):
        return _number(value.real) + (f" + {_number(value.imag)}j" if value.imag else "")
    for builtin in (int, float):  # a fraction or a decimal may equal one of these
        with suppress(ValueError, OverflowError):  # not finite, or too large
            if builtin(value) == value:
                return _number(builtin(value))
    try:
        return "{}/{}".format(*value.as_integer_ratio())
    except (AttributeError, ValueError):  # an unknown kind of number, or a Decimal that is none
        return _unequal(value)


def _unequal(value: Any) -> str:
    return f"<{type(value).__name__} {os.urandom(8).hex()}>"
