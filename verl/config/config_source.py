# SPDX-License-Identifier: Apache-2.0
"""YAML of config files and arguments as plain values, within limits that no honest config comes near.

The parser builds values by recursion in C, which ends the process where lists stand in lists some ten
thousand deep: the depth is counted first. Aliases that multiply or hold themselves are refused by OmegaConf.
What references make, `a: ${b}${b}`, `b: ${c}${c}` and so on, is measured before it is made.
"""

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

MAX_DEPTH = 32  # mappings and lists inside of one another; the deepest option lies five deep
MAX_BYTES = 1 << 20  # of a file; one with every option and its help has 60 thousand
REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")  # dots lead upwards from where it stands
MAX_BITS = 1024  # of an integer; a larger one is no number of any option, and may be too long to print
# What the constructors of PyYAML and OmegaConf raise for words such as `0b_`, `!!int x` or `!!bool x`.
UNREADABLE = (
    yaml.YAMLError, OmegaConfBaseException, ArithmeticError, AttributeError, LookupError, OSError, TypeError,
    ValueError,
)  # fmt: skip


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the sections of a YAML file; references such as `${a.b}` stay as they are.

    Raises:
        ValueError: There is no such file, or it cannot be read or is no mapping; the message names it.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no file {path}")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes, and a config at most {MAX_BYTES}: is it another file?")
    try:
        content = _plain(path.read_text(encoding="utf-8"), lambda text: OmegaConf.load(io.StringIO(text)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold sections such as `data:` at the top, it holds a list")
    return {str(key): value for key, value in content.items()}


def read_argument(text: str) -> Any:
    """Return the value that an argument's YAML describes.

    Raises:
        ValueError: It is not valid YAML.
    """
    return _plain(text, lambda text: OmegaConf.from_dotlist([f"value={text}"]))["value"]


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the values that `${a.b}` and `${oc.env:NAME}` in them stand for.

    Raises:
        ValueError: A reference leads nowhere, or in a circle; the message names its key.
    """
    try:
        _check_growth(values)
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
        _check_values(resolved)
    except OmegaConfBaseException as error:
        raise ValueError(f"`{error.full_key or ''}`: {one_line(error)}") from error
    assert isinstance(resolved, dict), "it was a mapping"
    return {str(key): value for key, value in resolved.items()}


def one_line(error: Exception) -> str:
    """Return the message of an error without line breaks; its kind, too, where the message is but a value."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__} {text}" if isinstance(error, LookupError | AttributeError) else text


def _plain(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        _check_depth(text)
        values = OmegaConf.to_container(parse(text), resolve=False)
        _check_values(values)
    except UNREADABLE as error:
        raise ValueError(one_line(error)) from error
    return values


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1
            raise ValueError(f"line {line}: mappings and lists are more than {MAX_DEPTH} deep in one another")


def _check_values(value: Any, key: str = "") -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _check_values(name, key)
            _check_values(item, f"{key}.{name}" if key else f"{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_values(item, key)
    elif isinstance(value, str) and value.encode(errors="ignore").decode() != value:
        raise ValueError(f"`{key}` must be text that can be written as UTF-8, got {value!r:.80}")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"`{key}` must have at most {MAX_BITS} bits, got {value.bit_length()}")
    elif not isinstance(value, int | float | str | None):
        raise ValueError(f"`{key}` must be a number, text, list or mapping, got {type(value).__name__}")


def _check_growth(values: dict[str, Any]) -> None:
    sizes: dict[tuple[str, ...], int] = {}

    def size(key: tuple[str, ...], value: Any) -> int:
        if key in sizes:
            return sizes[key]
        sizes[key] = 1  # of a reference in a circle, which OmegaConf refuses
        if isinstance(value, dict | list):
            total = 1 + sum(size((*key, name), child) for name, child in _children(value))
        elif isinstance(value, str):
            total = len(value)
            for dots, name in REFERENCE.findall(value):
                target = (*key[: len(key) - len(dots)], *_parts(name)) if dots else _parts(name)
                total += size(target, _at(values, target))
        else:
            total = 1
        if total > MAX_BYTES:
            raise ValueError(f"`{'.'.join(key)}` refers to more than {MAX_BYTES} characters or values")
        sizes[key] = total
        return total

    try:
        size((), values)
    except RecursionError as error:
        raise ValueError(
            "references lead to references that lead on, more often than can be followed"
        ) from error


def _children(value: dict | list) -> list[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [(str(name), child) for name, child in pairs]


def _parts(name: str) -> tuple[str, ...]:
    return tuple(name.replace("[", ".").replace("]", "").split("."))


def _at(values: Any, key: tuple[str, ...]) -> Any:
    """What stands under a key, None if nothing does: OmegaConf tells of that."""
    for name in key:
        values = dict(_children(values)).get(name) if isinstance(values, dict | list) else None
    return values
