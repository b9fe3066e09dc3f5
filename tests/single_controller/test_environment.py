# SPDX-License-Identifier: Apache-2.0
"""Effects of the environment variables of ranks."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.single_controller.workers import EchoWorker
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.ray.environment import CPU_CACHES
from verl.single_controller.worker import Worker

pytestmark = pytest.mark.heavy

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


def test_a_cpu_rank_does_not_grow_with_new_shapes(make_group):
    # With the libraries' own bounds it grows by about 170 MiB where the CPU multiplies bf16 by oneDNN.
    (growth,) = make_group(Multiplier, processes=1).growth()

    assert growth < 60 * MIB


def test_a_cache_size_set_by_the_user_is_kept(make_group, monkeypatch):
    name = next(iter(CPU_CACHES))
    monkeypatch.setenv(name, "7")

    (environment,) = make_group(EchoWorker, "hello", processes=1).environment()

    assert environment[name] == "7"
