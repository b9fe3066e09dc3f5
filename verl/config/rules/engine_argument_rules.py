# SPDX-License-Identifier: Apache-2.0
"""Rules of `worker.rollout.engine_arguments`: what a run depends on has options, and names must be known."""

import ast
import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from verl.config.hints.renamed_keys import RenamedKey, read_entry

OWN_ARGUMENTS = Path(__file__).parents[1] / "hints" / "engine_arguments.yaml"
# Files of an engine's package, and the class in them that declares the arguments; None is all classes.
SOURCES: dict[str, tuple[str, str | None]] = {
    "vllm": ("engine/arg_utils.py", "EngineArgs"),
    "sglang": ("srt/arg_groups/fields/*.py", None),
}


def engine_argument_problems(path: str, engine: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems of `engine_arguments` of the section `path`; a user's own engine takes what it likes.

    The names are read from the files of the engine's package: importing it takes seconds.
    """
    key = f"{path}.engine_arguments"
    if engine == "hf":
        yield f"`{key}` must be empty with `{path}.name=hf`, got {sorted(arguments)}: transformers takes none"
    own = own_arguments().get(engine, {})
    known = declared_arguments(engine)
    for name in map(str, arguments):
        pattern = next((each for each in own if fnmatchcase(name, each)), None)
        if pattern is not None:
            option, reason = own[pattern]
            yield f"`{key}.{name}` must not be set: " + (f"set `{option}` instead" if option else reason)
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            yield f"`{key}.{name}` is not an argument of the installed {engine}{hint}"


@cache
def own_arguments() -> dict[str, dict[str, RenamedKey]]:
    """Arguments that runs set themselves, by engine and pattern of names: the option, or the reason."""
    tables = yaml.safe_load(OWN_ARGUMENTS.read_text(encoding="utf-8"))
    return {
        engine: {pattern: read_entry(text) for pattern, text in table.items()}
        for engine, table in tables.items()
    }


@cache
def declared_arguments(engine: str) -> frozenset[str]:
    """Return the names of an engine's arguments; none if it is not installed here."""
    spec = find_spec(engine) if engine in SOURCES else None
    if spec is None:
        return frozenset()
    pattern, wanted = SOURCES[engine]
    files = [file for folder in spec.submodule_search_locations or () for file in Path(folder).glob(pattern)]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return frozenset(
        entry.target.id
        for node in nodes
        if isinstance(node, ast.ClassDef) and wanted in (None, node.name)
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    )
