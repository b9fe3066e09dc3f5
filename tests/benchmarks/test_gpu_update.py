# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark runs anywhere with a tiny shape, and needs torch and transformers only."""

import json
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


@pytest.mark.parametrize(
    "options", [("--images", "1", "--checkpointing"), ("--images", "0", "--min-response-length", "3")]
)
def test_a_tiny_shape_runs_on_the_cpu_with_torch_and_transformers_alone(options):
    result, packages = run_benchmark("--tiny", "--device", "cpu", *options)

    assert not set(packages) & set(NOT_NEEDED)
    assert result["tokens"] == 4 * 24 + result["response_tokens"]
    for name in ("log_probs", "update"):
        assert result[name]["seconds"] > 0
        assert result[name]["tokens_per_s"] == pytest.approx(result["tokens"] / result[name]["seconds"])
        assert 0 < result[name]["share_of_ceiling"] < 1
