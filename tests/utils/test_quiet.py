# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from tests.helpers.optimizers import needs_torchao
from verl.utils.quiet import quiet_torchao


def test_torch_still_warns_of_everything_else(caplog):
    quiet_torchao()
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
