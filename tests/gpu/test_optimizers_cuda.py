# SPDX-License-Identifier: Apache-2.0
"""Every optimizer updates on a device as on the CPU, its state offloaded between updates."""

import pytest
import torch

from tests.gpu.alone import run_apart
from tests.helpers.optimizers import IN_BF16, MARKED_STRATEGIES, Parameters, gradients

pytestmark = pytest.mark.nightly("verl/optim")

UPDATES, RATE = 3, 1e-2
BF16_STEP = 2**-5  # of weights below 8
BF16_SPACING = 2**-7  # relative to a weight, at most
DIFFERENCE = {  # at most
    "adamw": 1e-5,
    "adamw_bf16": BF16_STEP,  # rounded to the other side
    "adamw_bf16_sr": UPDATES * BF16_STEP,  # other random numbers
    "adamw_8bit": RATE,  # a moment on the border of two codes
    "muon": 0.2 * RATE,  # products in bf16, summed in another order
}


def updated(strategy, device):
    """Weights before and after some updates."""
    from verl.config.model import OptimConfig
    from verl.distributed.offload import Offloader
    from verl.optim.build import build_optimizer

    model = Parameters(torch.bfloat16 if strategy in IN_BF16 else torch.float32).to(device)
    before = [param.detach().float().cpu().numpy().copy() for param in model.parameters()]
    optimizer = build_optimizer(model, OptimConfig(lr=RATE, strategy=strategy))
    offloader = Offloader(model, device, optimizer=optimizer, offloads_weights=False, offloads_state=True)
    for step in range(UPDATES):
        for param, grad in gradients(model, step):
            param.grad = grad.to(device)
        with offloader.loaded(with_optimizer=True):
            optimizer.step()
    return before, [param.detach().float().cpu().numpy() for param in model.parameters()]


@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_a_device_updates_as_the_cpu_does(strategy, device):
    (before, expected), (_, found) = (
        run_apart(updated, strategy, place, device=place) for place in ("cpu", device)
    )

    spacing = BF16_SPACING if strategy == "adamw_bf16_sr" else 0.0
    for start, one, other in zip(before, expected, found, strict=True):
        assert abs(one - other).max() <= DIFFERENCE[strategy]
        assert abs(one - other).mean() < 0.3 * abs(one - start).mean() + spacing * abs(one).mean()
