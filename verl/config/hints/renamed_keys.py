# SPDX-License-Identifier: Apache-2.0
"""Names of another program's options here, for the errors about its keys and for its migration page.

The keys of a program are a data file such as `verl_keys.yaml`, which describes its own format. To support
another program, add a file and an instance.
"""

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SINGLE = 12  # number of keys up to which each gets a sentence; more are shown as a table
ANYWHERE = "*."  # prefix of an entry that matches in any section
MAX_DEPTH = 8  # of a key in a data file
MAX_SHOWN = 200  # characters of a key in an error message
OVERRIDE_SIGNS = "+~"  # Hydra's prefixes of a key on the command line
INDENT = 6 * " "
WIDTH = 110


class RenamedKey(NamedTuple):
    """Counterpart of another program's key."""

    option: str | None  # None: nothing here has its effect
    note: str = ""  # difference beyond the name; without an option the reason


@dataclass(frozen=True)
class RenamedKeys:
    """The keys of one program."""

    program: str
    page: str  # of the docs, which explains them
    file: Path  # YAML, read at the first unknown key, because a run rarely needs it

    @cached_property
    def data(self) -> dict[str, Any]:
        return yaml.safe_load(self.file.read_text(encoding="utf-8"))

    @cached_property
    def keys(self) -> Mapping[str, RenamedKey]:
        """Every entry by its key, including those of repeated sections."""
        data, repeated = self.data, {}
        listed = {key: read_entry(text) for table in data["keys"].values() for key, text in table.items()}
        for section, (original, ours, replacement) in data["repeats"].items():
            for key, (option, note) in listed.items():
                if key.startswith(f"{original}."):
                    if option and option not in data["shared"]:
                        option = option.replace(ours, replacement, 1)
                    repeated[section + key.removeprefix(original)] = RenamedKey(option, note)
        return repeated | listed

    def find(self, key: str) -> str | None:
        """Return the entry that covers a key: its own, that of an enclosing section, or that of its name."""
        names = key.lstrip(OVERRIDE_SIGNS).split(".")
        sections = [".".join(names[:end]) for end in range(min(len(names) - 1, MAX_DEPTH), 0, -1)]
        absent = [name for name in sections if name in self.keys and not self.keys[name].option]
        candidates = (".".join(names), *absent, ANYWHERE + names[-1])
        return next((name for name in candidates if name in self.keys), None)

    def problems(self, found: Sequence[tuple[str, str]]) -> list[str]:
        """Return sentences for a few keys, each with its entry from `find`, or a table and list for many."""
        if len(found) <= SINGLE:
            return [self._sentence(key[:MAX_SHOWN], *self.keys[entry]) for key, entry in found]
        renamed = {key: self.keys[entry] for key, entry in found if self.keys[entry].option}
        absent = list(dict.fromkeys(entry for _, entry in found if not self.keys[entry].option))
        blocks = {
            f"{len(renamed)} keys of {self.program} have another name here ({self.page}):": _table(renamed),
            f"{len(absent)} keys and sections of {self.program} have no counterpart here"
            f" ({self.page} gives the reasons):": _lists(absent),
        }
        return [f"\n{INDENT}".join([heading, *lines]) for heading, lines in blocks.items() if lines]

    def _sentence(self, key: str, option: str | None, note: str) -> str:
        if option is None:
            return f"`{key}` is a key of {self.program} without a counterpart here: {note}"
        return f"`{key}` is {self.program}'s name for `{option}`" + (note and f": {note}")


def read_entry(text: str) -> RenamedKey:
    """Read `OPTION`, `OPTION; REMARK` or `none; REASON`."""
    option, _, note = text.partition("; ")
    return RenamedKey(None if option == "none" else option, note)


def _table(renamed: Mapping[str, RenamedKey]) -> list[str]:
    same: dict[tuple[str, str], list[str]] = defaultdict(list)  # keys that keep their name share a line
    sections: dict[str, list[str]] = defaultdict(list)
    for key, (option, note) in renamed.items():
        section, name = _divided(key)
        ours, _, last = (option or "").rpartition(".")
        if name == last and not note:
            same[section, ours].append(name)
        else:
            sections[section].append(f"{name} -> {option}{note and '; ' + note}")
    for (section, ours), names in same.items():
        sections[section] += _wrapped(f"{', '.join(names)} -> {ours}.{'*' if len(names) > 1 else names[0]}")
    return [line for name, lines in sections.items() for line in (name, *("  " + line for line in lines))]


def _lists(keys: Sequence[str]) -> list[str]:
    sections: dict[str, list[str]] = defaultdict(list)
    for section, name in map(_divided, keys):
        sections[section].append(name)
    lines = (_wrapped(f"{section}: {', '.join(names)}") for section, names in sections.items())
    return list(chain.from_iterable(lines))


def _divided(key: str) -> tuple[str, str]:
    names = key.split(".")
    depth = min(2, len(names) - 1)
    return ".".join(names[:depth]) or "at the top", ".".join(names[depth:])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - len(INDENT), subsequent_indent="  ", break_on_hyphens=False)


VERL_KEYS = RenamedKeys("verl", "docs/migration/verl.md", Path(__file__).with_name("verl_keys.yaml"))
