# SPDX-License-Identifier: Apache-2.0
import os
import random

import numpy as np
import pytest
import torch

from tests.helpers.copies import CountCopies
from verl.config.trainer import DEVICES
from verl.distributed.backends import BACKENDS
from verl.distributed.device import (
    backend_of,
    memory_metrics,
    random_state,
    resident_bytes,
    resolve_device,
    set_device,
    set_random_state,
    set_seed,
    to_device,
)


def test_auto_is_cuda_only_if_torch_sees_a_gpu():
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == "cpu"


def test_the_option_offers_the_kinds_that_there_are():
    assert ("auto", *BACKENDS) == DEVICES


def test_another_device_is_refused():
    with pytest.raises(ValueError, match=r"`trainer.device` must be one of"):
        resolve_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"found torch .* set trainer.device=cpu"):
        resolve_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpus_of_other_machines_are_used_when_asked_for_and_never_ignored_silently():
    assert resolve_device("cuda", {"CPU": 64.0, "GPU": 8.0}) == "cuda"
    assert resolve_device("cpu", {"CPU": 64.0, "GPU": 8.0}) == "cpu"
    with pytest.raises(RuntimeError, match=r"has 8: set trainer.device=cuda .*, or trainer.device=cpu"):
        resolve_device("auto", {"CPU": 64.0, "GPU": 8.0})
    with pytest.raises(RuntimeError, match=r"has 8: set trainer.device=npu .*, or trainer.device=cpu"):
        resolve_device("auto", {"CPU": 64.0, "NPU": 8.0})
    assert resolve_device("auto", {"CPU": 64.0}) == "cpu"


@pytest.mark.parametrize("device", ["npu", "xpu"])
def test_a_kind_of_gpu_that_torch_cannot_use_is_refused(device):
    with pytest.raises(RuntimeError, match=rf"\({device}\) needs a GPU .* set trainer.device=cpu"):
        resolve_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_rank_on_a_node_without_a_gpu_says_which_node():
    with pytest.raises(RuntimeError, match=rf"{os.uname().nodename} has torch .* repair that node"):
        set_device("cuda", local_rank=0)


def test_gloo_serves_cpu_tensors_on_every_device():
    assert backend_of("cpu").groups == "cpu:gloo"
    assert backend_of("cuda").groups == "cpu:gloo,cuda:nccl"
    assert backend_of(torch.device("cuda", 1)).groups == "cpu:gloo,cuda:nccl"
    assert backend_of("npu:0").groups == "cpu:gloo,npu:hccl"


def test_a_seed_repeats_all_three_generators():
    def draw():
        set_seed(7)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw() == draw()


def test_resident_memory_follows_an_allocation():
    before = resident_bytes()
    block = np.ones(64 << 20, dtype=np.uint8)

    assert resident_bytes() - before > 48 << 20
    assert memory_metrics("cpu")["perf/cpu_memory_used_gb"] > block.nbytes / 2**30


def test_tensors_of_a_type_reach_the_device_in_one_copy():
    values = {
        "ids": torch.arange(6).view(2, 3),
        "rows": (torch.tensor([7]), None, "name", [torch.empty(0, dtype=torch.int64)]),
        "pixels": torch.rand(2, 2),
    }

    with CountCopies() as counted:
        sent = to_device(values, "meta")
    same = to_device(values, "cpu")

    assert counted.copies == 2
    assert sent["ids"].shape == (2, 3) and sent["ids"].device.type == "meta"
    assert sent["rows"][1:3] == (None, "name") and sent["pixels"].dtype == torch.float32
    assert torch.equal(same["ids"], values["ids"]) and torch.equal(same["pixels"], values["pixels"])
    assert same["rows"][0].tolist() == [7] and same["rows"][3][0].numel() == 0


@pytest.mark.parametrize("is_listed", [False, True], ids=["tuples and tensors", "lists"])
def test_random_state_restores_all_three_generators(is_listed):
    np.random.randn()  # numpy keeps the second of a pair of normal numbers
    state = random_state()
    draws = random.random(), np.random.randn(), np.random.rand(), torch.rand(1).item()
    if is_listed:  # as engines saved it in earlier versions
        version, words, gauss = state["python"]
        name, keys, *others = state["numpy"]
        state |= {"python": [version, list(words), gauss], "numpy": [name, keys.tolist(), *others]}

    set_random_state(state)

    assert (random.random(), np.random.randn(), np.random.rand(), torch.rand(1).item()) == draws
