# SPDX-License-Identifier: Apache-2.0
"""Python values as JSON with their types: reading a value from the sandbox executes nothing."""

import json
from typing import Any

CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset}
OTHER = "other"


def to_text(value: Any) -> str:
    """Encode numbers, text, arrays and containers of them; anything else by the name of its type."""
    try:
        return json.dumps(_tagged(value))
    except RecursionError as error:
        raise ValueError("the value contains itself or is nested too deeply") from error


def from_text(text: str) -> Any:
    """Decode an untrusted text; raises a ValueError unless it is of the form that `to_text` writes."""
    try:
        return _untagged(json.loads(text))
    except (RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not an encoded value: {error}") from error


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [_tagged(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if hasattr(value, "tolist"):  # arrays and scalars of numpy
        return _tagged(value.tolist())
    return {OTHER: type(value).__name__}


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_untagged(key): _untagged(item) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == OTHER:
        return object()  # equals nothing
    return CONTAINERS[kind](_untagged(item) for item in content)
