# SPDX-License-Identifier: Apache-2.0
"""Configs from Python values, as arguments of a command: with the same checks and the same errors."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.config.parsing import yaml_text
from verl.config.schema import ConfigError, list_options

Source = str | os.PathLike[str] | Mapping[str, Any]  # a YAML file, or its sections


def arguments_of(cls: type, source: Any, overrides: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Return the arguments for a `Source` or another config, with some options replaced.

    Keys may be dotted (`{"trainer.max_steps": 2}`) or nested (`{"trainer": {"max_steps": 2}}`).

    Raises:
        ConfigError: The source is none of them, or a value is of a type that no option has.
    """
    arguments: list[str] = []
    if isinstance(source, cls):
        arguments += as_arguments(cls, dataclasses.asdict(source))
    elif isinstance(source, Mapping):
        arguments += as_arguments(cls, source)
    elif isinstance(source, str | os.PathLike):
        arguments.append(f"config={os.fspath(source)}")
    else:
        raise ConfigError([
            f"a config must be a path, a mapping or a {cls.__name__}, got {type(source).__name__}"
        ])  # fmt: skip
    for layer in overrides:  # later ones win
        arguments += as_arguments(cls, layer)
    return arguments


def as_arguments(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them: `section.option=value`."""
    return list(_arguments(values, frozenset(entry.key for entry in list_options(cls))))


def _arguments(values: Mapping[str, Any], options: frozenset[str], path: str = "") -> Iterator[str]:
    """Yield `section.option=value` for each value; what an option holds is one value."""
    for name, value in values.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and key not in options:
            yield from _arguments(value, options, key)
        else:
            yield f"{key}={yaml_text(_plain(value, key))}"


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = type(value).__name__
    raise ConfigError([f"`{key}` must be a number, text, list or mapping, got {name}"])
