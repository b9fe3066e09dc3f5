# SPDX-License-Identifier: Apache-2.0
"""What every source file has, and what none has."""

import ast
import re

from tests.architecture.source import PACKAGE, ROOT, source_files, tree_of

LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX)\b")


def public_definitions(body):
    """Yield public functions and classes, and the public methods of public classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def is_excused(path, node):
    """Whether the method is documented by the class it overrides, as in `noqa: D102 (nn.Module)`."""
    return "noqa: D102 (" in path.read_text().splitlines()[node.lineno - 1]


def test_every_public_name_has_a_docstring():
    missing = []
    for path in source_files():
        tree = tree_of(path)
        if tree.body and path.name != "__init__.py" and not ast.get_docstring(tree):
            missing.append(f"{path.relative_to(ROOT)}: the module")
        missing += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
            for node in public_definitions(tree.body)
            if not ast.get_docstring(node) and not is_excused(path, node)
        ]
    assert not missing, "no docstring:\n" + "\n".join(missing)


def test_nothing_prints():
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in source_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, "use a logger:\n" + "\n".join(prints)


def test_nothing_is_left_to_do():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in source_files(ROOT)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if LEFTOVERS.search(line) and path.parent.name != "architecture"
    ]
    assert not found, "\n".join(found)


def test_the_tree_is_at_most_three_folders_deep():
    assert max(len(path.relative_to(PACKAGE).parts) for path in source_files()) <= 4
