# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer state leave the device and come back unchanged."""

import pytest
import torch

from benchmarks.gpu.part import token_log_probs
from tests.gpu.alone import run_apart
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.nightly("verl/distributed")


def three_updates(folder, device, *, offload, cpu_offload=False):
    """Weights after three steps, and the bytes on the device between them."""
    from verl.config.model import FSDPConfig, ModelConfig, OptimConfig
    from verl.distributed.fsdp import make_mesh
    from verl.distributed.offload import Offloader
    from verl.optim.build import build_optimizer
    from verl.workers.model_builder import build_model

    model = build_model(
        ModelConfig(model_path=str(folder)),
        FSDPConfig(mp_param_dtype="fp32", enable_cpu_offload=cpu_offload),
        mesh=make_mesh(1, -1, device), device=device, trainable=True,
    )  # fmt: skip
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2))
    sequence = torch.arange(10, 50, device=device)
    offloader = Offloader(
        model, device, optimizer=optimizer, offloads_weights=offload, offloads_state=offload
    )
    resting = []
    for _ in range(3):
        with offloader.loaded(), torch.no_grad():  # nothing is copied back
            token_log_probs(model, sequence, 1, 1.0)
        with offloader.loaded(with_optimizer=True):
            token_log_probs(model, sequence, 1, 1.0).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        resting.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
        moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        assert {moment.device.type for moment in moments} == {"cpu" if offload or cpu_offload else device}
    weights = {name: weight.full_tensor().detach() for name, weight in model.named_parameters()}
    return {name: weight.cpu().numpy() for name, weight in weights.items()}, max(resting)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def stay(folder, device):
    return three_updates(folder, device, offload=False)


def leave(folder, device):
    return three_updates(folder, device, offload=True)


def sharded_on_cpu(folder, device):
    return three_updates(folder, device, offload=False, cpu_offload=True)


@pytest.fixture(scope="module")
def staying(folder, device):
    return run_apart(stay, folder, device, device=device)


def test_offloading_weights_and_optimizer_changes_no_update_and_frees_the_device(folder, device, staying):
    weights, resting = run_apart(leave, folder, device, device=device)

    for name, expected in staying[0].items():
        assert (weights[name] == expected).all(), name
    num_bytes = 12 * sum(weight.size for weight in weights.values())  # a weight and two moments, float32
    assert device == "cpu" or staying[1] - resting > 0.9 * num_bytes


def test_shards_kept_on_the_cpu_train_alike(folder, device, staying):
    weights, _ = run_apart(sharded_on_cpu, folder, device, device=device)

    for name, expected in staying[0].items():
        assert abs(weights[name] - expected).max() < 1e-5, name
