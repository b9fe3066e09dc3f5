# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the head's softmax runs anywhere, and the kernels read and write each logit once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly("verl/models/head")
def test_kernels_move_each_logit_once_and_torch_operations_many_times():
    done = subprocess.run(
        [sys.executable, "benchmarks/head_softmax.py", "--tiny", "--device", "cpu"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])["softmax"]
    # float32 products of one model or two are read; gradients are written in bfloat16.
    once = {"log-probs": 4, "their gradient": 4 + 2, "KL": 2 * 4, "its gradient": 2 * 4 + 2}
    for name, expected in once.items():
        assert found["triton"][name]["bytes_per_logit"] == pytest.approx(expected, rel=0.01)
        assert found["torch"][name]["bytes_per_logit"] > 10 * expected
        assert found["triton"][name]["milliseconds"] > 0
