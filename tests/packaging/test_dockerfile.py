# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile against the package's requirements and files; `make docker-check` runs its steps."""

import importlib.util
import shlex
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.architecture.source import ROOT
from verl.utils.version_check import NAME

TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: list(map(Requirement, lines)) for name, lines in PROJECT["optional-dependencies"].items()}
REQUIRED = {
    each.name: each.specifier for each in (*map(Requirement, PROJECT["dependencies"]), *EXTRAS["gpu"])
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_dockerfile", ROOT / "scripts" / "run_dockerfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def steps(script):
    return script.read_steps(TEXT)


def defaults(script, steps):
    return dict(script.argument_of(step, {}) for step in steps if step.instruction == "ARG")


def test_pinned_packages_are_those_that_the_extra_for_gpus_accepts(script, steps):
    pins = [Requirement(each) for each in shlex.split(defaults(script, steps)["PACKAGES"])]

    assert [pin.name for pin in pins] == ["torch", "torchvision", "vllm"]
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "==" and REQUIRED[pin.name].contains(exact.version), pin


@pytest.mark.parametrize(
    ("torch", "torchvision", "vllm"), [("2.13.0", "0.28.0", "0.32.0"), ("2.11.0", "0.26.0", "0.26.0")]
)
def test_builds_that_belong_together_satisfy_the_requirements(torch, torchvision, vllm):
    versions = {"torch": torch, "torchvision": torchvision, "vllm": vllm}

    assert [name for name, found in versions.items() if not REQUIRED[name].contains(found)] == []


def test_both_images_have_the_same_torch_and_vllm(script, steps):
    gpu = {
        pin.name: pin.specifier for pin in map(Requirement, shlex.split(defaults(script, steps)["PACKAGES"]))
    }
    cpu = {each.name.removesuffix("-cpu"): each.specifier for each in EXTRAS["cpu"]}

    assert gpu == cpu
    assert f"PACKAGES=torch{cpu['torch']}" in TEXT


def test_the_python_and_the_extra_exist(script, steps):
    values = defaults(script, steps)

    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(f"{values['PYTHON']}.0")
    assert values["EXTRA"] in EXTRAS
    assert next(step.rest for step in steps if step.instruction == "FROM") == "python:${PYTHON}-slim"
    assert f"docker build -t {NAME} ." in TEXT


def test_every_copied_file_exists_and_the_package_and_its_commands_are_among_them(steps):
    copied = [name for step in steps if step.instruction == "COPY" for name in step.rest.split()[:-1]]

    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "verl"} <= set(copied)


def test_steps_are_parsed_as_docker_does(script):
    text = '# a comment\nARG A="b c"\nRUN one && \\\n    # within\n    two\n\nCOPY x y ./\n'

    steps = script.read_steps(text)

    assert steps == [("ARG", 'A="b c"'), ("RUN", "one && two"), ("COPY", "x y ./")]
    assert script.argument_of(steps[0], {}) == ("A", "b c")
    assert script.argument_of(steps[0], {"A": "d"}) == ("A", "d")
    with pytest.raises(SystemExit, match="VOLUME"):
        script.read_steps("VOLUME /data")


def test_files_and_folders_are_copied_as_docker_does(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "REPOSITORY", tmp_path / "here")
    (tmp_path / "here" / "folder" / "__pycache__").mkdir(parents=True)
    (tmp_path / "here" / "folder" / "inner").write_text("in a folder")
    (tmp_path / "here" / "file").write_text("alone")

    script.copy("file ./", tmp_path / "root", "/opt/place")
    script.copy("folder folder", tmp_path / "root", "/opt/place")

    place = tmp_path / "root" / "opt" / "place"
    assert (place / "file").read_text() == "alone"
    assert [path.name for path in (place / "folder").iterdir()] == ["inner"]
