# SPDX-License-Identifier: Apache-2.0
"""A config as text, from the `option(...)` declarations: example YAML, resolved YAML, `--help`, Markdown."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from verl.config.schema import ConfigError, OptionEntry, is_section, value_at, walk_options
from verl.config.values import describe, yaml_text

WIDTH = 110
PAGE_HEAD = """\
# Every option

Written by `make config` from the declarations in the source. A section is a mapping in YAML; on the command
line an option is `section.option=value`. `--dry-run` prints what a run uses, `--help NAME` a part of this.
"""


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


def options_page(cls: type) -> str:
    """Return every option as a Markdown page: a heading for each section, above a table of its options."""
    entries = list(_walk_with_limits(cls))
    parts = [PAGE_HEAD, _table(entries, "")]
    for section in entries:
        if is_section(section.hint):
            parts.append(f"## `{section.key}`\n\n{_escaped(option_text(section, with_type=False))}\n")
            parts.append(_table(entries, section.key))
    return "\n".join(part for part in parts if part)


def _table(entries: Sequence[OptionEntry], section: str) -> str:
    """The options of one section, without those of sections inside it; empty if it has none of its own."""
    own = [entry for entry in entries if entry.key.rpartition(".")[0] == section]
    rows = [_table_row(entry) for entry in own if not is_section(entry.hint)]
    return "\n".join(["| option | values | default | |", "|---|---|---|---|", *rows, ""]) if rows else ""


def _table_row(entry: OptionEntry) -> str:
    """One option of the page; what a table or HTML would take as its own is escaped."""
    info, limits = entry.info, "; ".join(_limits(entry))
    kind = ", ".join(f"`{choice}`" for choice in info.choices) if info.choices else describe(entry.hint)
    values = "; ".join(fact for fact in (kind, info.range_text()) if fact)
    meaning = f"{info.help} ({limits})" if limits else info.help
    name, default = entry.key.rpartition(".")[2], yaml_text(entry.default)
    return f"| `{name}` | {_escaped(values)} | `{default}` | {_escaped(meaning)} |"


def _escaped(text: str) -> str:
    """Markdown that shows a text of words and of code in backticks as it is."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def option_text(entry: OptionEntry, with_type: bool = True) -> str:
    """Return the help of one option with its type, range, choices and limits."""
    info = entry.info
    kind = describe(entry.hint) if with_type else ""
    if info.choices:
        kind = "one of " + ", ".join(str(choice) for choice in info.choices)
    stated = "; ".join(fact for fact in (kind, info.range_text(), *_limits(entry)) if fact)
    return f"{info.help} ({stated})" if stated else info.help


def _limits(entry: OptionEntry) -> list[str]:
    """What this version lacks of an option, and why the value of another has no effect."""
    info, limits = entry.info, []
    if info.unavailable:
        only = "" if is_section(entry.hint) else f"only {_supported_text(entry)}: "
        limits.append(f"{only}this version has no {info.unavailable}")
    if info.inert:
        limits.append(f"no effect: {info.inert}")
    return limits


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
