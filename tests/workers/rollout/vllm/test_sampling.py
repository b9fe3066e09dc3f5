# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import torch

from verl.workers.rollout.vllm.engine_requests import scale_logits


def test_logits_are_divided_by_the_current_temperature():
    model = SimpleNamespace(compute_logits=lambda hidden: None if hidden is None else hidden.bfloat16())
    temperatures = [1.0]
    scale_logits(model, lambda: temperatures[-1])

    plain = model.compute_logits(torch.tensor([3.0]))
    temperatures.append(0.5)
    scaled = model.compute_logits(torch.tensor([3.0]))

    assert (plain.item(), scaled.item()) == (3.0, 6.0)
    assert plain.dtype == scaled.dtype == torch.float32
    assert model.compute_logits(None) is None
