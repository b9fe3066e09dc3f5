# SPDX-License-Identifier: Apache-2.0
"""A config as text, from the `option(...)` declarations: the example YAML, the resolved YAML and `--help`."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from verl.utils.config import ConfigError, OptionEntry, is_section, value_at, walk_options
from verl.utils.config_values import describe, yaml_text

WIDTH = 110


def example_yaml(cls: type) -> str:
    """Return every option with its example value, and its help above it as a comment."""
    lines: list[str] = []
    for entry in _walk_with_limits(cls):
        indent = "  " * entry.key.count(".")
        name = entry.key.rpartition(".")[2]
        if is_section(entry.hint):
            lines += [""] * (not indent) + _comment(option_text(entry, with_type=False), indent)
            lines.append(f"{indent}{name}:")
            continue
        value = entry.default if entry.info.example is None else entry.info.example
        lines += _comment(option_text(entry, with_type=False), indent)
        lines.append(f"{indent}{name}: {yaml_text(value)}")
    return "\n".join(lines).strip("\n") + "\n"


def config_yaml(config: Any, *, only_changed: bool = False) -> str:
    """Return the values of a loaded config as YAML that loads to the same config.

    Args:
        config: As `load_config` returns it.
        only_changed: Leave out the options that have their default.
    """
    lines: list[str] = []
    for entry in _changed_entries(config) if only_changed else walk_options(type(config)):
        value = "" if is_section(entry.hint) else " " + yaml_text(value_at(config, entry.key))
        lines.append(f"{'  ' * entry.key.count('.')}{entry.key.rpartition('.')[2]}:{value}")
    return "\n".join(lines) + "\n"


def _changed_entries(config: Any) -> list[OptionEntry]:
    """The options that differ from the config that nobody changed, and the sections around them."""
    entries, default = list(walk_options(type(config))), type(config)()
    changed = [
        entry.key for entry in entries
        if not is_section(entry.hint) and value_at(config, entry.key) != value_at(default, entry.key)
    ]  # fmt: skip
    return [entry for entry in entries if any(_is_inside(key, entry.key) for key in changed)]


def help_text(cls: type, topic: str = "") -> str:
    """Return the options of a section, or those with `topic` in the key; all of them without a topic.

    Raises:
        ConfigError: No key has `topic` in it.
    """
    entries = list(_walk_with_limits(cls))
    chosen = [entry for entry in entries if _is_inside(entry.key, topic)]
    chosen = chosen or [entry for entry in entries if topic in entry.key and not is_section(entry.hint)]
    if not chosen:
        raise ConfigError([f"`--help {topic}`: no section and no option has this in its name"])
    lines: list[str] = []
    for entry in chosen:
        if is_section(entry.hint):
            lines += ["", *textwrap.wrap(f"{entry.key}: {option_text(entry, with_type=False)}", WIDTH)]
            continue
        lines.append(f"  {entry.key}={yaml_text(entry.default)}")
        lines += textwrap.wrap(option_text(entry), WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines).strip("\n") + "\n"


def option_text(entry: OptionEntry, with_type: bool = True) -> str:
    """Return the help of one option with its type, range, choices and limits."""
    info = entry.info
    kind = describe(entry.hint) if with_type else ""
    if info.choices:
        kind = "one of " + ", ".join(str(choice) for choice in info.choices)
    facts = [kind, info.range_text()]
    if info.unavailable:
        only = "" if is_section(entry.hint) else f"only {_supported_text(entry)}: "
        facts.append(f"{only}this version has no {info.unavailable}")
    if info.inert:
        facts.append(f"no effect: {info.inert}")
    stated = "; ".join(fact for fact in facts if fact)
    return f"{info.help} ({stated})" if stated else info.help


def _walk_with_limits(cls: type) -> Iterator[OptionEntry]:
    """Yield sections and options; what a whole section lacks is said at the section only."""
    limits: dict[str, str | None] = {"": None}
    for entry in walk_options(cls):
        limits[entry.key] = entry.info.unavailable
        if entry.info.unavailable == limits[entry.key.rpartition(".")[0]]:
            entry = entry._replace(info=dataclasses.replace(entry.info, unavailable=None))
        yield entry


def _supported_text(entry: OptionEntry) -> str:
    return ", ".join(yaml_text(value) for value in entry.info.supported or (entry.default,))


def _is_inside(key: str, topic: str) -> bool:
    return not topic or key == topic or key.startswith(f"{topic}.")


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
