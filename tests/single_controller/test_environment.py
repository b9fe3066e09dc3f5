# SPDX-License-Identifier: Apache-2.0
"""Effects of the environment variables of ranks."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.single_controller.workers import EchoWorker
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.ray.processes import CPU_CACHES, allocator_settings
from verl.single_controller.worker import Worker

MIB = 1 << 20


class Multiplier(Worker):
    @register(Dispatch.ALL, phase="multiply")
    def growth(self) -> int:
        """Growth of this process in bytes over 272 new shapes, after 128 others."""
        weight = torch.ones(256, 128, dtype=torch.bfloat16)

        def multiply(rows):
            for row in rows:
                F.linear(torch.ones(row, 128, dtype=torch.bfloat16), weight)
            status = Path("/proc/self/status").read_text()
            return 1024 * int(status.partition("RssAnon:")[2].split()[0])

        before = multiply(range(1, 129))
        return multiply(range(129, 401)) - before


@pytest.mark.nightly
@pytest.mark.heavy
def test_a_cpu_rank_does_not_grow_with_new_shapes(make_group):
    # With the libraries' own bounds it grows by about 170 MiB where the CPU multiplies bf16 by oneDNN.
    (growth,) = make_group(Multiplier, processes=1).growth()

    assert growth < 60 * MIB


@pytest.mark.nightly
@pytest.mark.heavy
def test_a_cache_size_set_by_the_user_is_kept(make_group, monkeypatch):
    name = next(iter(CPU_CACHES))
    monkeypatch.setenv(name, "7")

    (environment,) = make_group(EchoWorker, "hello", processes=1).environment()

    assert environment[name] == "7"


def test_segments_of_a_gpu_grow_unless_the_user_set_its_allocator():
    def setting(**environment):
        return allocator_settings(environment)["PYTORCH_CUDA_ALLOC_CONF"]

    assert setting() == setting(PYTORCH_CUDA_ALLOC_CONF="") == "expandable_segments:True"
    assert setting(PYTORCH_CUDA_ALLOC_CONF="backend:native") == "backend:native"
    # where torch takes the new name, vLLM 0.26 must still see it
    assert setting(PYTORCH_ALLOC_CONF="max_split_size_mb:64") == "max_split_size_mb:64"
