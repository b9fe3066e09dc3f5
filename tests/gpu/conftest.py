# SPDX-License-Identifier: Apache-2.0
"""Tests marked `gpu(n)` are skipped where there are fewer CUDA devices."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed, found = marker.args[0], torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        pytest.skip(f"needs {needed} CUDA devices, found {found}")
