# SPDX-License-Identifier: Apache-2.0
"""What is built is complete, the same from either archive, and starts where nothing else is installed."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.source import ROOT, SKIPPED, source_files
from verl import __version__

# What reading a config and looking for its model need; a run needs much more.
LIGHT = ("omegaconf", "pyyaml", "packaging", "rich", "huggingface-hub", "jinja2", "numpy", "pillow", "av")
pytestmark = pytest.mark.nightly(
    "pyproject.toml", "setup.py", "README.md", "examples", "scripts", "verl/cli", "verl/viewer/static"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = """
import importlib, json, sys
found = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
        found[name] = None
    except ModuleNotFoundError as error:
        found[name] = error.name
print(json.dumps(found))
"""


def environment():
    """That of this process, in which nothing is importable but what is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, cwd, **options):
    """Run a command that must succeed; returns what it printed."""
    options = {"env": environment()} | options
    result = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return result.stdout


def build(source, out, *switches):
    """Build without fetching what builds; returns the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", *switches, "--outdir", out, source, cwd=source)
    (wheel,) = out.glob("*.whl")
    return wheel


def contents(wheel):
    """Each file of a wheel with its bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The source tree without what tools leave there; building writes into the tree."""
    folder = tmp_path_factory.mktemp("source") / "clone"
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(*SKIPPED, "*.egg-info", ".*", "outputs", "site")
    )
    return folder


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    """The wheel that is built from the sdist, which is what `make build` makes."""
    return build(clone, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment that has the wheel and `LIGHT`, copied from here, and no more."""
    folder = tmp_path_factory.mktemp("light") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in LIGHT:
        copy_distribution(name, packages)
    return python


def copy_distribution(name, packages):
    """Copy an installed distribution and what it requires."""
    installed = distribution(name)
    for file in installed.files:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)
    for text in installed.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            copy_distribution(requirement.name, packages)


def test_the_sdist_builds_the_same_wheel_as_the_tree(clone, wheel, tmp_path):
    from_sdist, from_tree = contents(wheel), contents(build(clone, tmp_path, "--wheel"))

    assert wheel.name == f"easy_verl-{__version__}-py3-none-any.whl"
    assert (wheel.parent / f"easy_verl-{__version__}.tar.gz").exists()
    assert sorted(from_sdist) == sorted(from_tree)
    assert [name for name in from_tree if from_tree[name] != from_sdist[name]] == []


def test_the_wheel_holds_each_file_of_the_package_and_nothing_beside_it(wheel):
    files = contents(wheel)
    shipped = {name for name in files if ".dist-info/" not in name and ".data/" not in name}

    packages = {"verl": ROOT, "verl_longvideo": ROOT / "examples"}  # with the folder that each is in
    assert shipped == {
        path.relative_to(folder).as_posix()
        for name, folder in packages.items()
        for path in source_files(folder / name, "*")
    }
    assert "verl/viewer/static/index.html" in shipped


def test_the_wheel_ships_the_examples_and_scripts(wheel):
    prefix = f"easy_verl-{__version__}.data/data/share/easy-verl/"
    shipped = {name.removeprefix(prefix) for name in contents(wheel) if name.startswith(prefix)}

    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in ("examples", "scripts")
        for path in source_files(ROOT / folder, "*")
    }
    assert shipped == expected - {"scripts/docs_site.py"}


def test_examples_of_the_wheel_are_one_command_away(python, tmp_path):
    run(python.with_name("verl-examples"), "mine", cwd=tmp_path)

    command = (python.with_name("verl-print-config"), "config=examples/config.yaml", "--changed")
    printed = run(*command, cwd=tmp_path / "mine")

    assert "examples/reward_function/" in printed


@pytest.mark.parametrize("origin", ["git@host.example:team/name.git", "https://host.example/team/name.git"])
def test_the_readme_of_a_wheel_links_to_the_origin_of_its_clone(clone, tmp_path, origin):
    copy = shutil.copytree(clone, tmp_path / "clone")
    for command in (["init", "-q"], ["remote", "add", "origin", origin]):
        run("git", *command, cwd=copy)

    metadata = contents(build(copy, tmp_path / "dist"))[
        f"easy_verl-{__version__}.dist-info/METADATA"
    ].decode()

    assert "Project-URL: Source, https://host.example/team/name\n" in metadata
    assert "](https://host.example/team/name/blob/main/docs/start.md)" in metadata
    assert "](docs/" not in metadata


def test_the_wheel_carries_the_licence_and_every_command(wheel):
    files = contents(wheel)
    folder = f"easy_verl-{__version__}.dist-info"

    assert files[f"{folder}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    for command, target in PROJECT["scripts"].items():
        assert f"{command} = {target}" in files[f"{folder}/entry_points.txt"].decode()


def test_a_config_is_checked_and_planned_before_anything_heavy_is_installed(python, tmp_path):
    train = python.with_name("verl-train")
    (tmp_path / "run.yaml").write_text(run(train, "--print-config", cwd=tmp_path))
    (tmp_path / "reward.py").write_text("def main(reward_inputs): ...\n")
    overrides = ["data.format_prompt=null", "worker.reward.reward_function=reward.py:main"]

    assert run(train, "--help", cwd=tmp_path).startswith("usage:")
    assert "plan of a training step" in run(train, "config=run.yaml", *overrides, "--dry-run", cwd=tmp_path)


def test_the_doctor_tells_what_is_missing(python, tmp_path):
    result = subprocess.run(
        [python.with_name("verl-doctor"), "--quick", "--json"],
        cwd=tmp_path, capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    found = {check["name"]: check for check in json.loads(result.stdout)}

    assert result.returncode == 1, result.stderr
    assert found["packages"]["level"] == "FAIL"
    assert "torch" in found["packages"]["found"] and "pip install" in found["packages"]["remedy"]


def test_every_module_is_there_and_lacks_nothing_but_declared_dependencies(python, tmp_path):
    paths = [path for path in source_files(ROOT / "verl") if "child_site" not in path.parts]  # found by path
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    extras = [
        text for name in ("judge", "agents", "diffusion") for text in PROJECT["optional-dependencies"][name]
    ]
    declared = [*PROJECT["dependencies"], *extras, "vllm", "triton"]
    distributions = {Requirement(text).name.lower().replace("-", "_") for text in declared}
    modules = distributions - {"pillow"} | {"PIL"}

    lacks = json.loads(run(python, "-c", MODULES, cwd=tmp_path, input=json.dumps(names)).splitlines()[-1])

    undeclared = {
        name: lack for name, lack in lacks.items() if lack and lack.partition(".")[0] not in modules
    }
    assert undeclared == {}
    for name in (
        "verl.trainer.main",
        "verl.config.ppo",
        "verl.cli.doctor",
        "verl.config.worker",
    ):
        assert lacks[name] is None
    assert lacks["verl.workers.fsdp_worker"] in ("torch", "numpy")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the commands of an environment that has the wheel with its extra `cpu`, and no clone."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    (torch,) = (text for text in PROJECT["optional-dependencies"]["cpu"] if text.startswith("torch=="))
    for requirements in ([torch], [f"{wheel}[cpu]", "matplotlib"]):  # in the order of the README
        run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements, cwd=folder)
    return folder / "bin"


def alone():
    return environment() | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}


@pytest.mark.slow
def test_an_installation_with_its_cpu_extra_trains_the_demo(installed, tmp_path):
    run(installed / "verl-examples", "copy", cwd=tmp_path)

    demo = (installed / "python", "copy/examples/quickstart/demo.py", "--text", "--folder", tmp_path / "demo")
    printed = run(*demo, "trainer.max_steps=50", cwd=tmp_path, env=alone())

    summary = json.loads(printed.splitlines()[-1])
    assert summary["steps"] == 50
    assert summary["val_after"] > max(summary["val_before"], 0.4)
    assert Path(summary["checkpoint"]).is_relative_to(tmp_path)


@pytest.mark.slow
def test_an_installation_begins_trains_evaluates_and_chats(installed, tmp_path):
    run(installed / "verl-init", "mine", "--kind", "text", cwd=tmp_path, env=alone())
    folder, checkpoint = tmp_path / "mine", "checkpoints/mine/first/global_step_2"
    steps = ("trainer.max_steps=2", "trainer.save_freq=2")

    trained = run(installed / "verl-train", "config=run.yaml", *steps, cwd=folder, env=alone())
    scored = run(
        *(installed / "verl-eval", "config=run.yaml", "--model", checkpoint, "--json"),
        cwd=folder,
        env=alone(),
    )
    answer = run(
        *(installed / "verl-chat", checkpoint, "--format-prompt", "prompt.jinja", "--max-tokens", "1"),
        cwd=folder, env=alone(), input="What colour?\n",
    )  # fmt: skip

    assert "finished 2 steps in " in trained
    assert json.loads(scored)["overall"]["prompts"] > 0
    assert len(answer.splitlines()) == 1
