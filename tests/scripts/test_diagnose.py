# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine before a run, with remedies."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest

from tests.helpers.training import ROOT
from verl.cli.checks import (
    Level,
    check_compiler,
    check_disk,
    check_fabric,
    check_gpus,
    check_ray,
    check_shared_memory,
    is_built_for,
)
from verl.cli.doctor import check_imports, check_plain_transformers, check_requirements, main, run_checks
from verl.distributed.gpus import QUERY, Gpu, old_driver, read_gpus


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))


def test_a_failed_check_exits_1_and_is_named(tmp_path):
    port = unused_port()
    env = os.environ | {"OMP_NUM_THREADS": "9999", "RAY_ADDRESS": f"127.0.0.1:{port}"}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "diagnose.py", "--quick", "--json"],
        env=env, cwd=tmp_path, preexec_fn=few_files, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {name for name, finding in findings.items() if finding["level"] == "FAIL"} == {"open files", "ray"}
    assert findings["open files"]["found"] == "512 at most"
    assert f"127.0.0.1:{port}, from RAY_ADDRESS" in findings["ray"]["found"]
    assert findings["threads"]["level"] == "WARN" and "OMP_NUM_THREADS=9999" in findings["threads"]["found"]
    assert all(finding["remedy"] for finding in findings.values() if finding["level"] != "OK")


def test_warnings_and_failures_are_printed_with_a_remedy_below(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")

    status = main(["--quick"])

    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("WARN  threads"))
    assert lines[at + 1].strip().startswith("remedy: export OMP_NUM_THREADS=1")
    assert lines[-1].endswith(f"{sum(line.startswith('FAIL') for line in lines)} FAIL")
    assert status == int(any(line.startswith("FAIL") for line in lines))


def test_a_wrong_config_exits_2(capsys):
    assert main(["trainer.nnode=2"]) == 2
    assert "did you mean `trainer.nnodes`?" in capsys.readouterr().err


def test_a_cluster_that_listens_is_found(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        assert check_ray().level is Level.OK
    monkeypatch.setenv("RAY_ADDRESS", "no-port")
    assert check_ray().level is Level.FAIL


def test_requirements_are_compared_with_what_is_installed(monkeypatch):
    needed = ["numpy>=2", "numpy>=99", "no-such-package-here", 'an-extra; extra == "gpu"']
    monkeypatch.setattr("verl.cli.doctor.requires", lambda name: needed)

    finding = check_requirements()

    assert (finding.level, finding.remedy) == (Level.FAIL, "pip install 'numpy>=99' 'no-such-package-here'")
    assert finding.found.endswith(", no-such-package-here is missing")


def test_free_space_is_measured_for_a_folder_that_does_not_exist_yet(tmp_path):
    finding = check_disk(tmp_path / "not" / "yet")

    assert finding.found.endswith(f"GiB free for {tmp_path / 'not' / 'yet'}")
    assert not (tmp_path / "not").exists()
    assert check_shared_memory(tmp_path / "none").level is Level.WARN


def test_gpus_are_parsed_from_the_output_of_the_driver():
    answer = "NVIDIA H200, 143771, 0, 570.86.15\nNVIDIA GB10, [N/A], [N/A], 580.1\n"

    assert read_gpus(answer) == [
        Gpu("NVIDIA H200", 143771, 0, "570.86.15"),
        Gpu("NVIDIA GB10", 0, 0, "580.1"),
    ]


def test_code_for_a_generation_runs_from_its_version_on_and_portable_code_on_later_ones():
    assert is_built_for((8, 6), ["sm_80"])  # an Ampere of version 8.6
    assert not is_built_for((8, 0), ["sm_86"])
    assert not is_built_for((12, 0), ["sm_80", "sm_90"])
    assert is_built_for((12, 0), ["sm_90", "compute_90"])
    assert is_built_for((9, 0), ["sm_90a"]) and not is_built_for((10, 0), ["compute_90a"])


def test_gpus_without_a_torch_for_them_fail():
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    (finding,) = check_gpus([Gpu("NVIDIA H200", 143771, 0, "570.86")], "auto", 1)
    assert finding.level is Level.FAIL and "'easy-verl[gpu]'" in finding.remedy
    assert check_gpus([], "cuda", 1)[0].level is Level.FAIL
    assert check_gpus([], "auto", 1)[0].level is Level.OK


@pytest.mark.parametrize(
    ("driver", "cuda", "reason"),
    [
        ("550.54.15", "13.0", "driver 550.54.15 is older than 580, which CUDA 13.0 needs"),
        ("580.65", "13.0", None),
        ("550.54.15", "12.8", None),
        ("unknown", "13.0", None),
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_named(driver, cuda, reason):
    assert old_driver(driver, cuda) == reason


def answer_as_driver(folder, monkeypatch, answers):
    """Put an `nvidia-smi` first in PATH that answers these queries and fails on others."""
    program = folder / "nvidia-smi"
    cases = "".join(f'  --query-gpu={query}) echo "{answer}" ;;\n' for query, answer in answers.items())
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}  *) exit 6 ;;\nesac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("answers", "level"),
    [({"fabric.state": "Completed"}, "OK"), ({"fabric.state": "In Progress"}, "FAIL"), ({}, "OK")],
)
def test_gpus_that_wait_for_their_fabric_fail(tmp_path, monkeypatch, answers, level):
    answer_as_driver(tmp_path, monkeypatch, answers)

    finding = check_fabric()

    assert finding.level == level
    assert ("In Progress" in finding.found) is (level == "FAIL")


def test_a_machine_with_gpus_needs_a_c_compiler_and_the_headers_of_python(tmp_path, monkeypatch):
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "Python.h").write_text("")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert check_compiler().level is Level.OK and "nvcc is not needed" in check_compiler().found

    (tmp_path / "Python.h").unlink()
    assert check_compiler().level is Level.FAIL and "Python.h" in check_compiler().found
    (tmp_path / "gcc").unlink()
    assert check_compiler().found.startswith("no C compiler; no ")
    monkeypatch.setenv("CC", "a-compiler")
    assert check_compiler().found.startswith("no C compiler (CC=a-compiler)")


def test_the_checks_of_a_gpu_are_made_where_the_driver_lists_one(tmp_path, monkeypatch):
    answer_as_driver(tmp_path, monkeypatch, {QUERY: "NVIDIA H200, 143771, 0, 580.159"})

    names = [finding.name for finding in run_checks("hf", None, tries_imports=False)]

    at = names.index("gpus")
    assert names[at + 1 : at + 4] == ["gpu fabric", "c compiler", "attention"]


def test_an_import_that_fails_is_named_with_its_reason():
    assert check_imports(["json"]).level is Level.OK

    finding = check_imports(["json", "no_such_module"])
    assert finding.level is Level.FAIL
    assert finding.found == "no_such_module: ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.slow
def test_the_heavy_packages_can_be_imported_here():
    assert check_imports().found == "torch, transformers, ray, vllm"


@pytest.mark.nightly("verl/utils")
def test_a_program_without_this_package_can_load_models_here():
    assert check_plain_transformers().level is Level.OK
