# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from tests.helpers.optimizers import needs_torchao
from verl.utils.quiet import no_weight_bars, quiet_packages


def test_torch_still_warns_of_everything_else(caplog):
    quiet_packages()
    logger = logging.getLogger("torch.utils._pytree")

    logger.warning("%s is an Enum subclass and is now natively supported", "Kind")
    logger.warning("%s is registered twice", "Kind")

    assert caplog.messages == ["Kind is registered twice"]


@needs_torchao
@pytest.mark.slow
def test_a_process_that_imports_torchao_says_nothing():
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", "import verl, torchao"], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_vllm_still_warns_of_everything_but_the_lack_of_triton_on_cpus(caplog):
    quiet_packages()
    logger = logging.getLogger("vllm.triton_utils.importing")

    logger.warning("Triton is installed, but doesn't include CPU backend. Disabling Triton.")
    logger.warning("Triton is installed but 2 active driver(s) found (expected 1).")

    assert caplog.messages == ["Triton is installed but 2 active driver(s) found (expected 1)."]


def test_bars_of_weights_are_hidden_only_inside_the_block():
    from transformers.utils import logging as bars

    before = bars.is_progress_bar_enabled()
    bars.enable_progress_bar()
    try:
        with no_weight_bars():
            inside = bars.is_progress_bar_enabled()
        after = bars.is_progress_bar_enabled()
    finally:
        if not before:
            bars.disable_progress_bar()

    assert (inside, after) == (False, True)
