# SPDX-License-Identifier: Apache-2.0
"""What every source file has, and what none has."""

import ast
import re

from tests.architecture.source import PACKAGE, ROOT, source_files, tree_of
from verl.distributed.backends import gpu_backends

# The table of kinds of devices, their names as an option, and a key of checkpoints.
NAME_KINDS = {"distributed/backends.py", "config/trainer.py", "distributed/device.py"}
KINDS = {kind.name for kind in gpu_backends()}
LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX)\b")


def test_every_module_and_public_class_has_a_docstring():
    missing = []
    for path in source_files():
        tree = tree_of(path)
        if tree.body and path.name != "__init__.py" and not ast.get_docstring(tree):
            missing.append(f"{path.relative_to(ROOT)}: the module")
        missing += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
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


def test_one_table_names_the_kinds_of_gpus():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in source_files()
        if str(path.relative_to(PACKAGE)) not in NAME_KINDS
        for node in ast.walk(tree_of(path))
        if names_kind(node)
    ]
    assert not found, "ask `verl.distributed.device`:\n" + "\n".join(found)


def names_kind(node):
    """Return whether a node is `torch.cuda`, or "cuda" as a value."""
    if isinstance(node, ast.Constant):
        return node.value in KINDS
    is_of_torch = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
    return is_of_torch and node.attr in KINDS
