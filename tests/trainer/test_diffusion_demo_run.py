# SPDX-License-Identifier: Apache-2.0
"""The demos with diffusion models, as a newcomer starts them."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from tests.helpers.training import QUICKSTART


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["--diffusion", "--diffusion-video"])
def test_a_diffusion_model_learns_to_paint_colors_in_wordings_that_it_was_not_trained_on(tmp_path, kind):
    command = [sys.executable, str(QUICKSTART / "demo.py"), kind, "--folder", str(tmp_path)]

    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    summary = json.loads(output.splitlines()[-1])
    assert summary["val_before"] <= 0.5 and summary["val_after"] >= 0.9
    for name in ("curves.png", "pictures.png"):
        assert min(Image.open(tmp_path / name).size) > 400
