# SPDX-License-Identifier: Apache-2.0
"""Misspelled paths: what lies next to a file or folder that does not exist."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

NUMBER = re.compile(r"\d+")
NAMED = re.compile(r"no (?:file or folder|file|folder) (.+?)(?: here)?(?:; | \(|$)")  # see `missing`
MIN_SIMILARITY = 0.8
MIN_HUB_SIMILARITY = 0.85  # if the name may also be one on a hub
MAX_EXTRA = 2  # characters by which a misspelled name is longer or shorter
MAX_ENTRIES = 2000  # of a folder that are compared


class MissingPath(str):
    """The problem of an option whose path does not exist."""


def missing(kind: str, path: Path) -> OSError:
    """Return the error for a path that does not exist, with the entry that was probably meant."""
    if "$" in str(path):
        reason = "options expand `~` and `${oc.env:HOME}`, and the shell `$HOME` outside of single quotes"
        return FileNotFoundError(f"no {kind} {path}: {reason}")
    if os.path.exists(path):
        return FileExistsError(f"{path} is no {kind}")
    nearest = nearest_sibling(path, MIN_SIMILARITY)
    if nearest is None:
        # Unlike `Path.exists`, false for a name that is too long.
        parent = next(folder for folder in path.parents if os.path.exists(folder))
        note = "" if parent == path.parent else f" ({parent} has no {path.relative_to(parent).parts[0]})"
        return FileNotFoundError(f"no {kind} {path}{note}")
    return FileNotFoundError(f"no {kind} {path}; did you mean {shown(nearest)}?")


def check_spelling(text: str, path: Path, *, same_numbers: bool = True) -> None:
    """Raise if a name could be on a hub, but nearly is that of a folder here.

    With `same_numbers`, `Qwen2.5-1.5B` is not a misspelled `Qwen2.5-7B`.
    """
    nearest = nearest_sibling(path, MIN_HUB_SIMILARITY)
    if nearest is None and not same_numbers:
        plain = NUMBER.sub("0", path.name)
        alike = (path.parent / name for name in _names_in(path.parent) if NUMBER.sub("0", name) == plain)
        nearest = next(alike, None)
    if nearest is not None and nearest.is_dir():
        raise FileNotFoundError(f"no folder {text} here; did you mean {shown(nearest)}?")


def nearest_sibling(path: Path, cutoff: float) -> Path | None:
    """Return the entry of the same folder whose name is most similar."""
    names, wanted = _names_in(path.parent), path.name.lower()
    alike = {
        name.lower(): name
        for name in names
        if abs(len(name) - len(wanted)) <= MAX_EXTRA and NUMBER.findall(name) == NUMBER.findall(wanted)
    }
    swapped = [name for name in alike if sorted(name) == sorted(wanted)]
    found = swapped or difflib.get_close_matches(wanted, alike, n=1, cutoff=cutoff)
    return path.parent / alike[found[0]] if found else None


def config_elsewhere(arguments: Sequence[str], problems: Sequence[str]) -> Iterator[str]:
    """Yield what to do if a path is missing that exists next to a config file in another folder."""
    folders = {Path(each.removeprefix("config=")).parent for each in arguments if each.startswith("config=")}
    found = [NAMED.search(problem) for problem in problems if isinstance(problem, MissingPath)]
    typed = [os.path.relpath(match[1]) for match in found if match]
    for folder in folders - {Path(), Path.cwd()}:
        if any(os.path.exists(folder / path) for path in typed):
            yield f"paths are relative to the folder that you are in, not to that of the config: cd {folder}"


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False))
    except (OSError, ValueError):  # ValueError: a NUL character
        return []


def shown(path: Path) -> str:
    """Return a path as it is typed from this folder."""
    try:
        return f"./{path.relative_to(Path.cwd())}"
    except ValueError:
        return str(path)
