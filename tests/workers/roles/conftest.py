# SPDX-License-Identifier: Apache-2.0
"""A process group of one, in the test process."""

import pytest
import torch.distributed as dist

from tests.helpers.distributed import free_port


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{free_port()}")
    yield
    dist.destroy_process_group()
