# SPDX-License-Identifier: Apache-2.0
"""The pages on Python and evaluation, and the notebook, do what they show, in their order."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.architecture.test_docs import blocks
from tests.helpers.quickstart import make_folder
from tests.helpers.training import ROOT, quickstart_arguments
from verl.trainer.evaluation.report import FILE
from verl.viewer.runs import open_runs

NOTEBOOK = ROOT / "examples" / "notebooks" / "from_python.ipynb"
COMMANDS = {"verl-eval": "verl.cli.evaluate", "verl-chat": "verl.cli.chat"}
# One cluster for all calls of a page, and a check that each call leaves it alone.
CONNECT = "from verl.single_controller.ray.cluster import connect\nconnect(num_cpus=4)\n"


def run_python(code, folder, stdin=None):
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600, input=stdin,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-5000:]
    return finished.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the `run.yaml` that the pages name, whose run has been trained from the page."""
    from tests.api.conftest import as_mapping

    folder = make_folder(tmp_path_factory.mktemp("pages"))
    config, overrides = as_mapping(
        quickstart_arguments(
            folder,
            folder / "model",
            "worker.rollout.name=hf",
            "trainer.n_gpus_per_node=1",
            "trainer.save_freq=1",
            "trainer.project_name=colours",
            "trainer.experiment_name=first",
        )
    )
    sections = yaml.safe_load(Path(config).read_text())
    for key, value in overrides.items():
        *path, name = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder


@pytest.fixture(scope="module")
def printed(folder):
    """The output of all blocks of the page on Python."""
    return run_python(CONNECT + "\n".join(blocks(ROOT / "docs" / "python.md", "python")), folder)


@pytest.mark.slow  # test_runs.py calls what it shows in every suite
@pytest.mark.heavy
def test_every_block_of_the_page_on_python_runs(printed, folder):
    lines = printed.splitlines()

    assert lines[0].startswith("2 ") and lines[0].endswith("checkpoints/colours/first/global_step_2")
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]  # the loop is left after step 2 of 3
    assert lines[3].endswith("checkpoints/colours/stepwise/global_step_2")
    assert "`trainer.max_steps` must be at least 1, got 0" in lines[-1]
    assert (folder / "evaluations" / "from_python" / FILE).is_file()


def commands_of(page):
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


@pytest.mark.slow
@pytest.mark.heavy
def test_every_command_of_the_page_on_evaluation_runs(printed, folder):
    commands = [line for line in commands_of(ROOT / "docs" / "evaluate.md") if "checkpoints/colours" in line]
    assert len(commands) == 4  # the others need a data set

    # The page's run has 40 steps, this one 2.
    outputs = [_run_shell(command.replace("global_step_40", "global_step_2"), folder) for command in commands]

    plain, sampled, talk, piped = outputs
    header = blocks(ROOT / "docs" / "evaluate.md", "text")[0].splitlines()[0]
    assert sampled.splitlines()[0].split() == header.split()
    assert plain.splitlines()[-1].split()[:3] == ["all", "5", "5"]
    assert sampled.splitlines()[-1].split()[:3] == ["all", "5", "20"]
    assert talk == "" and len(piped.splitlines()) >= 1
    (run,) = open_runs([folder / "evaluations" / "first_global_step_2"])
    assert run.state()["num_rollouts"] == 20  # of the last evaluation of this checkpoint


def _run_shell(command, folder):
    shutil.rmtree(folder / "bin", ignore_errors=True)
    (folder / "bin").mkdir()
    for name, module in COMMANDS.items():
        file = folder / "bin" / name
        file.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        file.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"},
    )  # fmt: skip
    assert finished.returncode == 0, f"{command}\n{finished.stderr[-4000:]}"
    return finished.stdout


def test_the_switches_of_the_page_are_those_of_the_command(capsys):
    from verl.cli import evaluate

    with pytest.raises(SystemExit):
        evaluate.main(["--help"])

    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    page = (ROOT / "docs" / "evaluate.md").read_text().split("## Talk")[0]
    assert set(re.findall(r"`(--[\w-]+)", page)) <= known


def cells():
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    stored = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]

    assert notebook["nbformat"] == 4 and len(stored) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in stored)


@pytest.mark.slow
@pytest.mark.heavy
def test_the_notebook_learns_and_evaluates_as_a_kernel_runs_it(tmp_path):
    # As in Jupyter: one namespace, and an event loop that is running. Each call has a cluster of its own.
    kernel = (
        "import asyncio, json, sys\n"
        "async def run(cells):\n"
        "    names = {'__name__': '__main__'}\n"
        "    for number, cell in enumerate(cells):\n"
        "        exec(compile(cell, f'cell {number}', 'exec'), names)\n"
        "asyncio.run(run(json.load(sys.stdin)))\n"
    )

    printed = run_python(kernel, tmp_path, json.dumps(cells()))

    first, last = map(float, re.search(r"reward ([\d.]+) -> ([\d.]+)", printed).groups())
    assert last > first + 0.2
    assert "yellow" in printed and "did you mean `trainer.max_steps`?" in printed


DEBUGGED = """
import json, socket, time
import ray
from ray._private.ray_constants import KV_NAMESPACE_PDB
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list


@ray.remote
class Worker:
    def work(self):
        secret = 41
        breakpoint()
        return secret + 1


worker = Worker.remote()
result = worker.work.remote()
found = []
while not found:  # what `ray debug` lists
    time.sleep(0.2)
    found = _internal_kv_list("RAY_PDB_", namespace=KV_NAMESPACE_PDB)
host, port = json.loads(_internal_kv_get(found[0], namespace=KV_NAMESPACE_PDB))["pdb_address"].rsplit(":", 1)
with socket.create_connection((host, int(port)), 30) as connection:
    terminal = connection.makefile("rw")
    terminal.write("p 'the secret', secret\\nc\\n")
    terminal.flush()
    print([line for line in terminal if "the secret" in line][-1].strip(), ray.get(result))
"""


@pytest.mark.slow
@pytest.mark.heavy
def test_rays_debugger_opens_a_breakpoint_in_a_worker_as_the_page_says(tmp_path, monkeypatch):
    assert "RAY_DEBUG=legacy verl-train" in (ROOT / "docs" / "python.md").read_text()
    monkeypatch.setenv("RAY_DEBUG", "legacy")

    printed = run_python(CONNECT + DEBUGGED, tmp_path)

    assert "('the secret', 41)" in printed and printed.split()[-1] == "42"
