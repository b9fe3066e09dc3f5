# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: lets transformers be imported where torch is CPU-only and torchvision is not."""

import os
from collections.abc import Iterator

import pytest

from verl.utils.cuda_builds import repair_cuda_builds
from verl.utils.imports import collection_paused

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share the cores
repair_cuda_builds()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without looking for garbage: half of the time, and none of it is found."""
    with collection_paused():
        return (yield)
