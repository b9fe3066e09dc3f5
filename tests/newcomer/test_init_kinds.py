# SPDX-License-Identifier: Apache-2.0
"""Every kind of folder that `verl-init` writes is trained on as it is."""

import os
import subprocess
import sys

import pytest

from verl.cli.init import KINDS, main
from verl.logger.file import read_log

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # tests/cli/test_init.py plans such runs in every suite


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_of_a_folder_as_it_is(kind, tmp_path):
    folder = tmp_path / kind
    assert main([str(folder), "--kind", kind]) == 0

    module, gradient = ("sft", "train/grad_norm") if kind == "sft" else ("main", "actor/grad_norm")
    command = [sys.executable, "-m", f"verl.trainer.{module}", "config=run.yaml", "trainer.max_steps=2"]
    environment = os.environ | {"RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)

    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    log = read_log(folder / "checkpoints" / kind / "first")
    assert [entry["step"] for entry in log] == [0, 1, 2]
    assert all(entry[gradient] > 0 for entry in log[1:])
