# SPDX-License-Identifier: Apache-2.0
"""The project's source as the architecture tests read it: parsed, never imported."""

import ast
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "verl"
SKIPPED = {".git", "build", "dist", "__pycache__", "checkpoints", "node_modules"}
OTHERS = re.compile(r"\.venv.*|.*\.egg-info")  # folders of what was installed


def source_files(folder: Path = PACKAGE, pattern: str = "*.py") -> list[Path]:
    """Return the files of a folder and below, without what tools leave there."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and not OTHERS.fullmatch(name)]
        found += [Path(parent, name) for name in names if fnmatch(name, pattern)]
    return sorted(found)


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each module that a file imports, wherever it does, with the line."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
