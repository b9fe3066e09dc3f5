# SPDX-License-Identifier: Apache-2.0
"""Every test takes a `device`, so that CI runs on the CPU what a GPU runs.

Tests marked `gpu(n)` are skipped where there are fewer CUDA devices.
"""

import pytest
import torch


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def device(request):
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed, found = marker.args[0], torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        pytest.skip(f"needs {needed} CUDA devices, found {found}")
