# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine before a run, with remedies."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.helpers.training import ROOT
from verl.cli.doctor import (
    Level,
    check_disk,
    check_gpus,
    check_imports,
    check_ray,
    check_shared_memory,
    is_built_for,
    main,
    unmet,
)
from verl.distributed.gpus import Gpu, read_gpus


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


def test_requirements_are_compared_with_what_is_installed():
    needed = [Requirement(text) for text in ("numpy>=2", "numpy>=99", "no-such-package-here")]

    assert unmet(needed) == needed[1:]


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


def test_an_import_that_fails_is_named_with_its_reason():
    assert check_imports(["json"]).level is Level.OK

    finding = check_imports(["json", "no_such_module"])
    assert finding.level is Level.FAIL
    assert finding.found == "no_such_module: ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.slow
def test_the_heavy_packages_can_be_imported_here():
    assert check_imports().found == "torch, transformers, ray, vllm"
