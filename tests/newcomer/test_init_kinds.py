# SPDX-License-Identifier: Apache-2.0
"""Every kind of folder that `verl-init` writes is trained on as it is; images are the start page's."""

import os
import subprocess
import sys

import pytest

from verl.cli.init import KINDS, main
from verl.logger.file import read_log

pytestmark = pytest.mark.heavy

MODULES = {"text": "verl.trainer.main", "video": "verl.trainer.main", "sft": "verl.trainer.sft"}
GRADIENT = {"text": "actor/grad_norm", "video": "actor/grad_norm", "sft": "train/grad_norm"}


def test_every_kind_is_trained_on_here_or_by_the_start_page():
    assert {*MODULES, "image"} == KINDS.keys()


@pytest.mark.parametrize("kind", MODULES)
def test_two_steps_of_a_folder_as_it_is(kind, tmp_path):
    folder = tmp_path / kind
    assert main([str(folder), "--kind", kind]) == 0

    command = [sys.executable, "-m", MODULES[kind], "config=run.yaml", "trainer.max_steps=2"]
    environment = os.environ | {"RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)

    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    log = read_log(folder / "checkpoints" / kind / "first")
    assert [entry["step"] for entry in log] == [0, 1, 2]
    assert all(entry[GRADIENT[kind]] > 0 for entry in log[1:])
