# SPDX-License-Identifier: Apache-2.0
"""Who may import what."""

import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter

import pytest

from tests.architecture.shape import below, imported_at_start, modules
from tests.architecture.source import PACKAGE, ROOT, imports_of, source_files

LAYERS = [  # top first
    {"cli"},
    {"api"},
    {"trainer"},
    {"planning"},
    {"diffusion"},
    {"workers"},
    {"agents"},
    {"data", "rewards", "checkpoint", "optim", "single_controller", "viewer"},
    {"protocol", "algorithms", "models", "logger"},
    {"utils", "config", "distributed", "batch_keys", "sandbox"},
]
HOMES = {
    "ray": ("trainer/", "single_controller/ray/"),
    "vllm": ("workers/rollout/",),
    "torch.distributed": ("workers/", "models/", "distributed/", "checkpoint/"),
}
CONFIG_MODULES = (
    *("verl.config.ppo", "verl.config.worker", "verl.planning.step_plan", "verl.trainer.main"),
    *("verl.trainer.sft", "verl.planning.memory_plan"),
)
ALGORITHMS_NEVER_IMPORT = ("ray", "torch.distributed", "vllm", "transformers", "verl.config.schema")


MAX_FILES = 17  # of a folder: more ask for a cut, see CONTRIBUTING.md


def layer_of(unit):
    return next(index for index, units in enumerate(LAYERS) if unit in units)


def is_or_is_inside(module, package):
    return module == package or module.startswith(f"{package}.")


def test_each_layer_imports_only_layers_below_it():
    wrong = []
    for path in source_files():
        unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if unit == "__init__":
            continue
        for module, line in imports_of(path):
            other = module.split(".")[1] if module.startswith("verl.") else unit
            if other not in (unit, "__version__") and layer_of(other) <= layer_of(unit):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {unit} must not import {other}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in source_files()}
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): {
            name
            for module, _ in imports_of(path)
            for name in (module, module.rpartition(".")[0])
            if name in names
        }
        for path in source_files()
    }

    assert len(list(TopologicalSorter(graph).static_order())) == len(names)


def test_the_config_depends_on_nothing_of_the_package():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in source_files(PACKAGE / "config")
        for module, line in imports_of(path)
        if is_or_is_inside(module, "verl") and not is_or_is_inside(module, "verl.config")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_folder_is_crowded():
    files = Counter(path.parent for path in source_files() if path.name != "__init__.py")

    assert {str(folder): count for folder, count in files.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize("package", HOMES)
def test_a_package_is_imported_only_where_it_is_at_home(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in source_files()
        for module, line in imports_of(path)
        if is_or_is_inside(module, package)
        and not path.relative_to(PACKAGE).as_posix().startswith(HOMES[package])
    ]
    assert not wrong, "\n".join(wrong)


def test_algorithms_are_pure():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in source_files(PACKAGE / "algorithms")
        for module, line in imports_of(path)
        if any(is_or_is_inside(module, package) for package in ALGORITHMS_NEVER_IMPORT)
    ]
    assert not wrong, "\n".join(wrong)


def test_config_modules_import_no_torch():
    code = (
        f"import sys, {', '.join(CONFIG_MODULES)}; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "module",
    [
        "verl.agents.tools.host", "verl.rewards.worker_process", "verl.sandbox.kernel", "verl.viewer.process",
        "verl.single_controller.ray.failure", "verl.utils.processes.fork_server",
    ],
)  # fmt: skip
def test_a_process_that_starts_often_imports_no_torch(module):
    heavy = {"torch", "transformers", "datasets"}
    imported = {
        name.partition(".")[0]
        for below_it in below(module) | {module}
        for name in imported_at_start(modules()[below_it])
    }

    assert not imported & heavy


def test_packages_have_empty_init_files():
    for path in source_files(pattern="__init__.py"):
        if path.parent != PACKAGE:
            lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
            assert not lines, f"{path.relative_to(ROOT)} must be empty: importing a module imports one module"


def test_imports_are_absolute():
    for path in source_files():
        assert "from ." not in path.read_text(), path
