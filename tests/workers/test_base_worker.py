# SPDX-License-Identifier: Apache-2.0
"""Base classes of workers: what surrounds the call of a method."""

import contextlib

import pytest
import torch

from verl.workers.base_worker import DeviceWorker


class Marking(DeviceWorker):
    """A worker without a group."""

    def __init__(self, device: str) -> None:
        self.config, self.device = None, torch.device(device)

    def _show(self, phase: str) -> None: ...

    def double(self, number: int) -> int:
        return 2 * number


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["begin old", "end old"]), ("cpu", [])])
def test_a_phase_is_an_nvtx_range_on_cuda_only(monkeypatch, device, expected):
    events = []

    @contextlib.contextmanager
    def recorded(name):
        events.append(f"begin {name}")
        yield
        events.append(f"end {name}")

    monkeypatch.setattr(torch.cuda.nvtx, "range", recorded)

    assert Marking(device).execute("double", "old", 4) == 8
    assert events == expected
