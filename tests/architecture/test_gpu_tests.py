# SPDX-License-Identifier: Apache-2.0
"""Every test of a GPU also runs on the CPU, so that what it calls cannot change without it."""

import ast

import pytest

from tests.architecture.source import ROOT, source_files, tree_of

FOLDER = ROOT / "tests" / "gpu"
FILES = source_files(FOLDER, "test_*.py")
RUNNERS = {"run_alone", "run_apart"}


def functions(path):
    return {node.name: node for node in tree_of(path).body if isinstance(node, ast.FunctionDef)}


def devices(path, name):
    """The devices that a test or fixture is run with, through the fixtures that it takes."""
    known = functions(FOLDER / "conftest.py") | functions(path)
    node = known.get(name)
    if node is None:
        return set()
    # Parameters of the decorator, also by the name of a list in the module.
    lists = {target.id: one.value for one in tree_of(path).body if isinstance(one, ast.Assign)
             for target in one.targets if isinstance(target, ast.Name)}  # fmt: skip
    found = set()
    for decorator in node.decorator_list:
        parts = [*ast.walk(decorator)]
        named = [lists[part.id] for part in parts if isinstance(part, ast.Name) and part.id in lists]
        constants = [part for one in (decorator, *named) for part in ast.walk(one)]
        found |= {part.value for part in constants if isinstance(part, ast.Constant)} & {"cpu", "cuda"}
    own = {argument.arg for argument in node.args.args} - ({"device"} if found else set())
    return found.union(*(devices(path, argument) for argument in own - {name}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_gpu_test_also_runs_on_the_cpu(path):
    tests = [name for name in functions(path) if name.startswith("test_")]

    assert tests
    assert {name: devices(path, name) for name in tests} == {name: {"cpu", "cuda"} for name in tests}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_process_is_started_for_one_device_only(path):
    calls = [
        node for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNNERS
    ]  # fmt: skip
    fixed = [
        f"{path.name}:{call.lineno}"
        for call in calls
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Constant) and value.value in ("cpu", "cuda")
    ]

    assert not fixed, "pass the test's `device`:\n" + "\n".join(fixed)
