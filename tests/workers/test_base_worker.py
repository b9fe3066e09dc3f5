# SPDX-License-Identifier: Apache-2.0
"""Base classes of workers: what surrounds the call of a method."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from verl.workers import base_worker
from verl.workers.base_worker import DeviceWorker, ModelWorker
from verl.workers.sharded_model import ShardedModel


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


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA H100 80GB HBM3", 0.25), ("NVIDIA X1000", None)])
def test_utilization_counts_all_models_and_needs_a_known_device(monkeypatch, name, expected):
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(base_worker, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(base_worker, "device_name", lambda device: name)
    worker, policy, reference = map(object.__new__, (ModelWorker, ShardedModel, ShardedModel))
    worker.device, worker.models = torch.device("cuda"), [policy, reference]
    policy.flops, reference.flops = SimpleNamespace(done=5e15), SimpleNamespace(done=0.0)

    with worker._utilization("actor") as mfu:
        policy.flops.done += 889e12
        reference.flops.done += 100e12

    assert mfu == ({} if expected is None else {"perf/mfu_actor": expected})
