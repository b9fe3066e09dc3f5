# SPDX-License-Identifier: Apache-2.0
"""The shape of the package in numbers: `python -m tests.architecture.shape` prints them."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.source import PACKAGE, ROOT, source_files, tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    found = {}
    for path in source_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_at_start(path: Path) -> Iterator[str]:
    """Yield the names that importing a file imports, without those in functions and for type checkers."""
    waiting = list(tree_of(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, Function):
            waiting += ast.iter_child_nodes(node)


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of the package that `module` imports itself, with the packages around them."""
    found = set()
    for name in imported_at_start(modules()[module]):
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & modules().keys()
    return frozenset(found)


def below(module: str) -> set[str]:
    """Return the files that importing `module` imports, without itself and `__init__.py`."""
    seen, waiting = set(), [module]
    while waiting:
        new = imports(waiting.pop()) - seen
        seen |= new
        waiting += new
    return {name for name in seen - {module} if modules()[name].name != "__init__.py"}


def num_lines(path: Path) -> int:
    return path.read_text().count("\n")


def functions() -> Iterator[tuple[str, Function]]:
    """Yield each function of the package with its place."""
    for path in source_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def length(function: Function) -> int:
    """Return the lines of a function without those of its docstring."""
    doc = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - (doc.count("\n") + 1 if doc else 0)


def takes_whole_config(function: Function) -> bool:
    args = [*function.args.args, *function.args.kwonlyargs]
    return any(re.search(r"\bPPOConfig\b", ast.unparse(arg.annotation)) for arg in args if arg.annotation)


def imported_by(module: str, room: str) -> dict[str, int]:
    """Return how much importing `module` imports."""
    paths = [modules()[name] for name in below(module)]
    return {f"modules below {room}": len(paths), f"lines below {room}": sum(map(num_lines, paths))}


def measure() -> dict[str, int]:
    """Return every number that `test_shape.py` holds."""
    files = [path for path in source_files() if path.name != "__init__.py"]
    sizes = {path: num_lines(path) for path in files}
    rooms = Counter()
    for path, lines in sizes.items():
        rooms[path.relative_to(PACKAGE).parts[0]] += lines
    names = Counter(path.name for path in files)
    return {
        "percent of the largest room": round(100 * max(rooms.values()) / sum(rooms.values())),
        "files over 400 lines": sum(lines > 400 for lines in sizes.values()),
        "files under 60 lines": sum(lines < 60 for lines in sizes.values()),
        "files that share a name": sum(count for count in names.values() if count > 1),
        "longest function": max(length(function) for _, function in functions()),
        "functions that take PPOConfig": sum(takes_whole_config(function) for _, function in functions()),
        "lines of README.md": num_lines(ROOT / "README.md"),
        **imported_by("verl.trainer.ray_trainer", "the trainer"),
        **imported_by("verl.workers.roles.actor", "the actor"),
        **imported_by("verl.data.rl_dataset", "the data set"),
    }


if __name__ == "__main__":
    sys.stdout.writelines(f"{value:6}  {name}\n" for name, value in measure().items())
