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

from benchmarks.gpu import check, parts
from benchmarks.gpu.report import Report, missing_modules, read_report
from benchmarks.gpu.update import judge
from tests.gpu.alone import run_apart

ROOT = Path(__file__).resolve().parents[2]
ENGINE_CASES = ("plain", "reserved", "head", "top_p", "lora", "moe")
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


CHEAP = ("memory", "update", "tests.kernels")
OTHERS = [
    part.name for part in parts.PARTS if part.name not in (*CHEAP, "kernels") and part.name[:5] != "tests"
]  # the tests run anyway


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
    headlines = {part.name: part.headline for part in parts.PARTS}
    for part in found:
        assert part["laws"]
        assert all(
            key in part["figures"]
            for key in headlines[part["name"]]
            if not key.endswith(("mfu", "pinned_gb_per_s"))
        )


class Program(parts.Part):
    """A part that runs a line of Python."""

    def command(self, options, models):
        return [sys.executable, "-S", "-c", self.headline[0]]


def program(name, line, predicted_s=30):
    return Program(name, predicted_s, (), (line,))


def report(passed, found: float | str = 1.0):
    laws = {"law": "a law", "found": found, "bound": "<= 1", "passed": passed}
    return f"print({json.dumps(laws)!r}); print({json.dumps({'figure': 'speed', 'value': 2.5})!r})"


def run_parts(monkeypatch, tmp_path, *chosen, arguments=()):
    for module in (check, parts):
        monkeypatch.setattr(module, "PARTS", chosen)
    monkeypatch.setattr(check, "GRACE_S", 1)
    status = check.main(["--out", str(tmp_path), *arguments])
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    return status, {part["name"]: (part["status"], part["reason"]) for part in record["parts"]}


def test_one_part_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    lacks = report(False, "No module named 'missing_too'")

    status, found = run_parts(
        monkeypatch, tmp_path,
        program("broken", report(False)),
        program("ended", "raise SystemExit('no device')"),
        program("lacking", "import a_package_that_is_missing"),
        program("partly", f"{report(True)}; {lacks}"),
        program("idle", "print('2 skipped')"),
        program("whole", report(True)),
    )  # fmt: skip

    assert status == 1
    assert found == {
        "broken": ("FAIL", "a law"),
        "ended": ("ERROR", "exit status 1: no device"),
        "lacking": ("SKIPPED", "not installed: a_package_that_is_missing"),
        "partly": ("SKIPPED", "not installed: missing_too"),
        "idle": ("SKIPPED", "checks nothing here: 2 skipped"),
        "whole": ("PASS", ""),
    }
    assert "broken: FAIL: a law" in capsys.readouterr().out
    laws = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert [(law["part"], law["passed"]) for law in laws] == [
        ("broken", False), ("partly", True), ("whole", True)
    ]  # fmt: skip


def test_a_part_that_is_too_slow_ends_with_its_children_and_keeps_its_laws(monkeypatch, tmp_path):
    child = (
        "import os,subprocess,time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    )

    status, found = run_parts(monkeypatch, tmp_path, program("slow", f"{report(True)}; {child}", 2))

    assert status == 1 and found == {"slow": ("TIMEOUT", "more than 4 s")}
    assert json.loads((tmp_path / "gpu_check.jsonl").read_text())["law"] == "a law"
    pid = (tmp_path / "gpu_check.log").read_text().split()[-1]
    assert pid.isdigit(), "the child was started"
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_parts_that_have_passed_run_again_only_if_asked_or_on_another_machine(monkeypatch, tmp_path):
    def counting(name, passed):
        return program(name, f"open({str(tmp_path / name)!r}, 'a').write('x'); {report(passed)}")

    def runs(*arguments):
        run_parts(monkeypatch, tmp_path, good, bad, arguments=arguments)
        return [len((tmp_path / name).read_text()) for name in ("good", "bad")]

    good, bad = counting("good", True), counting("bad", False)

    assert runs() == [1, 1]
    assert runs() == [1, 2]
    assert runs("--only", "good", "--again") == [2, 2]
    monkeypatch.setattr(check, "find_versions", lambda: {"vllm": "0"})  # one more package, but torch is gone
    assert runs() == [3, 3]
    monkeypatch.setattr(check, "find_versions", lambda: {"vllm": "0", "torchao": "1"})
    assert runs() == [3, 4]


def test_the_budget_is_that_of_all_parts(monkeypatch, tmp_path):
    # Each look at the clock is ten seconds later: the second part begins with half a second left.
    clock = SimpleNamespace(
        perf_counter=itertools.count(0, 10).__next__, strftime=time.strftime, gmtime=time.gmtime
    )
    monkeypatch.setattr(check, "time", clock)

    status, found = run_parts(
        monkeypatch, tmp_path, program("first", report(True), 300),
        program("second", report(True), 300), arguments=["--budget", "40.5"],
    )  # fmt: skip

    assert status == 0
    assert found == {"first": ("PASS", ""), "second": ("SKIPPED", "the budget is spent")}


def test_parts_are_chosen_by_name_and_kind():
    names = [part.name for part in parts.chosen_parts("engine,kernels")]

    assert names[0] == "kernels" and len(names) == 7
    assert sorted(names[1:]) == sorted(f"engine.{case}" for case in ENGINE_CASES)
    assert [part.name for part in parts.chosen_parts("engine.lora")] == ["engine.lora"]
    with pytest.raises(SystemExit, match=r"unknown parts \['kernel'\]"):
        parts.chosen_parts("kernel")


def test_the_parts_of_a_call_are_predicted_to_fit_into_it(capsys):
    calls = [parts.chosen_parts(None, call) for call in (1, 2, 3)]

    assert all(calls) and all(sum(part.predicted_s for part in call) <= parts.CALL_S for call in calls)
    assert max(part.predicted_s for part in parts.PARTS) < 270
    check.main(["--call", "2", "--wheels"])
    assert {"omegaconf", "xgrammar", "compressed-tensors==0.17.0"} < set(capsys.readouterr().out.split())


def test_every_gpu_test_is_of_one_part():
    files = [f"test_{name}_cuda.py" for names in parts.GPU_TESTS.values() for name in names]
    names = [part.name for part in parts.PARTS if part.name.startswith("tests.")]

    assert sorted(files) == sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert sorted(names) == sorted(f"tests.{name}" for name in parts.GPU_TESTS)


@pytest.mark.heavy
@pytest.mark.nightly("tests/gpu")
def test_gpu_tests_share_a_process_until_one_fails():
    first, second = (run_apart(os.getpid, device="cpu") for _ in range(2))
    with pytest.raises(FileNotFoundError):
        run_apart(os.stat, "/missing", device="cpu")

    assert first == second != run_apart(os.getpid, device="cpu")


@pytest.mark.parametrize(
    ("has_blake3", "known", "expected", "note"),
    [
        (True, True, None, ""),
        (False, True, "sha256", "blake3 is not installed: VLLM_MM_HASHER_ALGORITHM=sha256"),
        (False, False, None, "does not know VLLM_MM_HASHER_ALGORITHM: images in the engine fail"),
    ],
)
def test_vllm_names_images_by_another_hash_without_blake3(
    monkeypatch, tmp_path, has_blake3, known, expected, note
):
    (tmp_path / "envs.py").write_text('"VLLM_MM_HASHER_ALGORITHM"' if known else "")
    specs = {"vllm": SimpleNamespace(origin=str(tmp_path / "__init__.py")), "blake3": has_blake3 or None}
    monkeypatch.setattr(check.importlib.util, "find_spec", specs.get)
    shown = "print(json.dumps({'figure': 'hash', 'value': os.environ.get('VLLM_MM_HASHER_ALGORITHM')}))"

    run_parts(monkeypatch, tmp_path, program("images", f"import json, os; {shown}"))

    record = json.loads((tmp_path / "gpu_check.json").read_text())
    assert record["parts"][0]["figures"]["hash"] == expected
    log = (tmp_path / "gpu_check.log").read_text()
    assert note in log and bool(note) == ("blake3" in log)


def test_a_module_that_an_installed_package_lost_is_not_a_missing_package():
    text = "No module named 'torch.gone'; No module named 'not_here.part'; No module named not_here_either"

    assert missing_modules(text) == ["not_here", "not_here_either"]
    law = {"law": "step", "found": "ModuleNotFoundError: No module named 'torch.gone'", "passed": False}
    found = read_report(json.dumps(law) + "\nshutting down")
    assert found.missing == [] and found.laws == [law]


def test_every_gpu_test_is_a_law_unless_it_is_skipped_or_lacks_a_package(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "def test_no_card(): pytest.skip('needs 1')\ndef test_lacking(): import not_here\n"
    )
    (tmp_path / "test_other.py").write_text("import not_here_either\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    plugin = ["-p", "benchmarks.gpu.pytest_laws", "--continue-on-collection-errors"]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip

    found = read_report(finished.stdout)
    verdicts = {law["law"].partition("::")[2]: law["passed"] for law in found.laws}
    assert verdicts == {"test_good": True, "test_bad": False}
    assert "assert 1 == 2" in next(law["found"] for law in found.laws if not law["passed"])
    assert found.missing == ["not_here", "not_here_either"]


@pytest.mark.parametrize(("mfu", "verdicts"), [(0.5, [True]), (0.4, [False]), (None, [])])
def test_an_update_is_held_against_the_asked_mfu(capsys, mfu, verdicts):
    row = {"mfu": mfu, "seconds": 2.0}

    judge(Report(), {"device": "NVIDIA H100", "shared_difference": 0.01, "update": row})

    found = read_report(capsys.readouterr().out)
    assert [law["passed"] for law in found.laws] == [True, *verdicts]
    assert found.figures["update_seconds"] == 2.0
