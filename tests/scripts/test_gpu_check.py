# SPDX-License-Identifier: Apache-2.0
"""The programs of the first hour on a GPU: parts alone, packages that are missing, time limits, verdicts."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import check
from benchmarks.gpu.outcome import missing_modules, read_report, read_tests, read_update

ROOT = Path(__file__).resolve().parents[2]
NOT_ON_A_BARE_MACHINE = (
    *("ray", "vllm", "tensordict", "omegaconf", "datasets", "torchdata", "qwen_vl_utils", "peft", "av"),
    *("aiohttp", "math_verify", "rich", "tensorboard", "pyarrow", "starlette", "uvicorn"),
)
# Hides packages from a process and its children.
HIDE = f"""
import sys

HIDDEN = {NOT_ON_A_BARE_MACHINE!r}


class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


@pytest.mark.heavy
@pytest.mark.nightly("scripts/gpu_check.sh", "benchmarks", "tests/gpu", "verl/distributed")
def test_on_a_bare_machine_kernels_run_and_other_parts_name_the_missing_packages(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHON": sys.executable}

    finished = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "--tiny", "--only", "kernels,memory", "--out", tmp_path / "out"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip

    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    kernels, memory = found["parts"]
    assert kernels["status"] == "PASS" and len(kernels["laws"]) >= 8
    assert all(law["passed"] and law["found"] < 1e-5 for law in kernels["laws"])
    assert kernels["figures"]["head_update_s"] > 0
    assert memory["status"] == "SKIPPED" and memory["reason"].startswith("not installed: ")
    assert set(memory["reason"].partition(": ")[2].split(", ")) <= set(NOT_ON_A_BARE_MACHINE)
    assert found["versions"]["torch"] and found["driver"] is None
    table = (tmp_path / "out" / "gpu_check.txt").read_text()
    assert table in finished.stdout
    assert "memory: SKIPPED: not installed: " in table


CHEAP = ("memory", "update")
OTHERS = [
    part.name for part in check.PARTS if part.name not in (*CHEAP, "kernels", "tests")
]  # `tests` run anyway


@pytest.mark.heavy
@pytest.mark.nightly("scripts/gpu_check.sh", "benchmarks", "tests/gpu", "verl/distributed")
@pytest.mark.parametrize(
    "names", [CHEAP, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["cheap", "others"]
)
def test_every_part_passes_on_the_cpu(tmp_path, names):
    status = check.main(["--tiny", "--only", ",".join(names), "--out", str(tmp_path)])

    found = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert status == 0, (tmp_path / "gpu_check.txt").read_text() + (tmp_path / "gpu_check.log").read_text()[
        -4000:
    ]
    assert [(part["name"], part["status"]) for part in found] == [(name, "PASS") for name in names]
    headlines = {part.name: part.headline for part in check.PARTS}
    for part in found:
        assert part["laws"]
        assert all(
            key in part["figures"]
            for key in headlines[part["name"]]
            if not key.endswith(("mfu", "pinned_gb_per_s"))
        )


class Program(check.Part):
    """A part that runs a line of Python."""

    def command(self, options, models, results):
        return [sys.executable, "-S", "-c", self.headline[0]]


def report(passed, found=1.0):
    law = {"name": "a law", "found": found, "bound": "<= 1", "passed": passed}
    return f"print({json.dumps({'laws': [law], 'figures': {'speed': 2.5}})!r})"


def run_parts(monkeypatch, tmp_path, *parts, arguments=()):
    monkeypatch.setattr(check, "PARTS", parts)
    monkeypatch.setattr(check, "GRACE_S", 1)
    status = check.main(["--out", str(tmp_path), *arguments])
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    return status, {part["name"]: (part["status"], part["reason"]) for part in record["parts"]}


def test_one_part_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    status, found = run_parts(
        monkeypatch, tmp_path,
        Program("broken", 30, (report(False),)),
        Program("ended", 30, ("raise SystemExit('no device')",)),
        Program("lacking", 30, ("import a_package_that_is_missing",)),
        Program("whole", 30, (report(True),)),
    )  # fmt: skip

    assert status == 1
    assert found == {
        "broken": ("FAIL", "a law"),
        "ended": ("ERROR", "exit status 1: no device"),
        "lacking": ("SKIPPED", "not installed: a_package_that_is_missing"),
        "whole": ("PASS", ""),
    }
    assert "broken: FAIL: a law" in capsys.readouterr().out


def test_a_part_that_is_too_slow_ends_with_its_children(monkeypatch, tmp_path):
    child = (
        "import os,subprocess,time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    )

    status, found = run_parts(monkeypatch, tmp_path, Program("slow", 4, (child,)))

    assert status == 1 and found == {"slow": ("TIMEOUT", "more than 4 s")}
    pid = (tmp_path / "gpu_check.log").read_text().split()[-1]
    assert pid.isdigit(), "the child was started"
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_budget_is_that_of_all_parts(monkeypatch, tmp_path):
    # Each look at the clock is ten seconds later: the second part begins with half a second left.
    clock = SimpleNamespace(
        perf_counter=itertools.count(0, 10).__next__, strftime=time.strftime, gmtime=time.gmtime
    )
    monkeypatch.setattr(check, "time", clock)

    status, found = run_parts(
        monkeypatch, tmp_path, Program("first", 300, (report(True),)),
        Program("second", 300, (report(True),)), arguments=["--budget", "40.5"],
    )  # fmt: skip

    assert status == 0
    assert found == {"first": ("PASS", ""), "second": ("SKIPPED", "the budget is spent")}


def test_parts_are_chosen_by_name_and_kind():
    names = [part.name for part in check.chosen_parts("engine,kernels")]

    assert names == ["kernels", *(f"engine.{case}" for case in check.CASES)]
    assert [part.name for part in check.chosen_parts("engine.lora")] == ["engine.lora"]
    with pytest.raises(SystemExit, match=r"unknown parts \['kernel'\]"):
        check.chosen_parts("kernel")


def test_a_module_that_an_installed_package_lost_is_not_a_missing_package():
    text = "No module named 'torch.gone'; No module named 'not_here.part'; No module named not_here_either"

    assert missing_modules(text) == ["not_here", "not_here_either"]
    law = {"name": "step", "found": "ModuleNotFoundError: No module named 'torch.gone'", "passed": False}
    assert read_report(json.dumps({"laws": [law], "figures": {}}) + "\nshutting down").missing == []


def test_gpu_tests_without_a_package_are_skipped_and_others_fail(tmp_path):
    (tmp_path / "results.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="a" name="good"/>
        <testcase classname="a" name="no_card"><skipped message="needs 1"/></testcase>
        <testcase classname="b" name="bad"><failure message="assert 1 == 2">trace</failure></testcase>
        <testcase classname="c"><error message="collection">No module named 'not_here'</error></testcase>
        </testsuite></testsuites>"""
    )

    found = read_tests(tmp_path / "results.xml")

    assert found.figures == {"passed": 1, "failed": 1, "skipped": 2, "not_installed": ["not_here"]}
    assert [(law["name"], law["passed"]) for law in found.laws] == [("b.bad", False), ("tests pass", False)]
    assert found.missing == []


@pytest.mark.parametrize(("mfu", "verdicts"), [(0.5, [True]), (0.4, [False]), (None, [])])
def test_an_update_is_held_against_the_asked_mfu(mfu, verdicts):
    row = {"mfu": mfu, "seconds": 2.0}

    found = read_update(json.dumps({"device": "NVIDIA H100", "shared_difference": 0.01, "update": row}))

    assert [law["passed"] for law in found.laws] == [True, *verdicts]
    assert found.figures["update_seconds"] == 2.0
