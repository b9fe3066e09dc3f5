# SPDX-License-Identifier: Apache-2.0
"""What the options of another program are called here, and how an error says so.

A config or a command that was written for another program has keys that are unknown here. For a program whose
keys are listed as `RenamedKeys`, `load_config` names the option that each of them became, or says that
there is none, instead of guessing the nearest name. To list a program: one module like `verl_keys.py`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SINGLE = 12  # keys that are explained in a sentence each; more are those of a whole file, shown as a table
ANYWHERE = "*."  # begins the entry of a name that stands in any section
MAX_DEPTH = 8  # names in an entry at most
MAX_SHOWN = 200  # characters of a key that an error quotes
OVERRIDE_SIGNS = "+~"  # Hydra's, before a key on the command line
INDENT = 6 * " "
WIDTH = 110


class RenamedKey(NamedTuple):
    """What a key of another program is here."""

    option: str | None  # None: nothing here does what it says
    note: str = ""  # what is different beside the name; without an option, why there is none


def absent(why: str) -> RenamedKey:
    """A key, or a whole section, that has no counterpart."""
    return RenamedKey(None, why)


@dataclass(frozen=True)
class RenamedKeys:
    """The keys of one program. An entry without an option stands for everything below it, too.

    Attributes:
        program: Its name, in errors.
        page: Where all of them are explained.
        keys: By their dotted name; `*.name` in any section.

    Example::

        RenamedKeys("abc", "docs/abc.md", {"optim.rate": RenamedKey("worker.actor.optim.lr")})
    """

    program: str
    page: str
    keys: Mapping[str, RenamedKey]

    def find(self, key: str) -> str | None:
        """Return the entry of a key, or None: its own, that of a section around it, or that of its name."""
        names = key.lstrip(OVERRIDE_SIGNS).split(".")
        if ".".join(names) in self.keys:
            return ".".join(names)
        for end in range(min(len(names) - 1, MAX_DEPTH), 0, -1):
            section = self.keys.get(".".join(names[:end]))
            if section is not None and section.option is None:
                return ".".join(names[:end])
        anywhere = ANYWHERE + names[-1]
        return anywhere if anywhere in self.keys else None

    def problems(self, found: Sequence[tuple[str, str]]) -> list[str]:
        """Tell what became of keys: a sentence for each of a few, for many a table and a list.

        Args:
            found: Each key as the user wrote it, with its entry from `find`.
        """
        if len(found) <= SINGLE:
            return [self._sentence(key, self.keys[entry]) for key, entry in found]
        moved = [(key, self.keys[entry]) for key, entry in found if self.keys[entry].option is not None]
        absent_keys = list(dict.fromkeys(entry for _, entry in found if self.keys[entry].option is None))
        return [
            *_block(f"{len(moved)} keys are {self.program}'s; here they are ({self.page}):", _table(moved)),
            *_block(
                f"{len(absent_keys)} keys and sections of {self.program} have no counterpart here"
                f" ({self.page} says why):",
                _lists(absent_keys),
            ),
        ]

    def _sentence(self, key: str, there: RenamedKey) -> str:
        key = key[:MAX_SHOWN]
        if there.option is None:
            return f"`{key}` is {self.program}'s and has no counterpart here: {there.note}"
        return f"`{key}` is {self.program}'s name of `{there.option}`{_after(': ', there.note)}"


def _block(heading: str, lines: Sequence[str]) -> list[str]:
    """One problem of several lines; none where there is nothing to say."""
    return ["\n".join([heading, *(INDENT + line for line in lines)])] if lines else []


def _table(moved: Sequence[tuple[str, RenamedKey]]) -> list[str]:
    """A line for each key below the name of its section; keys that keep their name share one."""
    same: dict[tuple[str, str], list[str]] = {}
    sections: dict[str, list[str]] = {}
    for key, (option, note) in moved:
        section, name = _divided(key)
        ours, _, last = (option or "").rpartition(".")
        if name == last and not note:
            same.setdefault((section, ours), []).append(name)
        else:
            sections.setdefault(section, []).append(f"{name} -> {option}{_after('; ', note)}")
    for (section, ours), names in same.items():
        joined = f"{', '.join(names)} -> {ours}.{'*' if len(names) > 1 else names[0]}"
        sections.setdefault(section, []).extend(_wrapped(joined))
    return [
        line for section, lines in sections.items() for line in (section, *("  " + line for line in lines))
    ]


def _lists(keys: Sequence[str]) -> list[str]:
    """The names of keys, those of a section together."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, name = _divided(key)
        sections.setdefault(section, []).append(name)
    return [
        line for section, names in sections.items() for line in _wrapped(f"{section}: {', '.join(names)}")
    ]


def _divided(key: str) -> tuple[str, str]:
    """A key as its section, of at most two names, and the rest of its name."""
    names = key.split(".")
    depth = min(2, len(names) - 1)
    return ".".join(names[:depth]) or "at the top", ".".join(names[depth:])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - len(INDENT), subsequent_indent="  ", break_on_hyphens=False)


def _after(separator: str, text: str) -> str:
    return separator + text if text else ""
