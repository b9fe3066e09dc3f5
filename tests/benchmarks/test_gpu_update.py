# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark runs anywhere with a tiny shape, and needs torch and transformers only."""

import argparse
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]
NOT_NEEDED = ("ray", "vllm", "tensordict", "omegaconf", "datasets", "torchdata", "qwen_vl_utils", "peft")
# Runs the script as its command does, and says what it imported.
RUNNER = """
import json, runpy, sys
sys.argv = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def run_benchmark(*arguments):
    """What it measured, and the packages it imported."""
    program = RUNNER.format(arguments=[str(ROOT / "benchmarks" / "gpu_update.py"), *arguments])
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    result, packages = finished.stdout.splitlines()[-2:]
    return json.loads(result), json.loads(packages)


@pytest.mark.nightly("benchmarks", "verl/models/attention")
@pytest.mark.parametrize(
    "options",
    [("--images", "1"), ("--images", "0", "--min-response-length", "3", "--no-checkpointing")],
)
def test_a_tiny_shape_runs_on_the_cpu_with_torch_and_transformers_alone(options):
    result, packages = run_benchmark("--tiny", "--device", "cpu", *options)

    assert not set(packages) & set(NOT_NEEDED)
    assert result["tokens"] == 4 * 24 + result["response_tokens"]
    assert result["shared_difference"] < 0.02  # bfloat16; a wrong token differs by 0.3
    for name in ("log_probs", "update", "shared_log_probs", "shared_update"):
        assert result[name]["seconds"] > 0
        assert result[name]["tokens_per_s"] == pytest.approx(result["tokens"] / result[name]["seconds"])
        assert result[name]["share_of_ceiling"] > 0
    # Operations: seconds x speed. A shared prompt of 24 tokens runs once for two responses of at most 16.
    flops = {name: result[name]["seconds"] * result[name]["tflops"] for name in ("update", "shared_update")}
    assert 0.5 < flops["shared_update"] / flops["update"] < 0.9


def test_the_largest_number_types_that_fit_the_device_are_taken():
    module = runpy.run_path(str(ROOT / "benchmarks" / "gpu_update.py"))
    parameters = {"3b": 3_754_622_976, "7b": 8_292_166_656}
    memory = {"H100": 79.2 * 2**30, "H200": 139.8 * 2**30}
    options = argparse.Namespace(weights="auto", optimizer="auto")

    chosen = {
        (shape, gpu): module["choose_storage"](options, count, size)[:2]
        for shape, count in parameters.items()
        for gpu, size in memory.items()
    }

    assert chosen == {
        ("3b", "H100"): ("float32", "adamw"),
        ("3b", "H200"): ("float32", "adamw"),
        ("7b", "H100"): ("bfloat16", "adamw_8bit"),
        ("7b", "H200"): ("bfloat16", "adamw_bf16"),
    }
    given = argparse.Namespace(weights="float32", optimizer="muon")
    assert module["choose_storage"](given, parameters["7b"], memory["H100"])[:2] == ("float32", "muon")
