# SPDX-License-Identifier: Apache-2.0
"""Divided experts on one device, with the exchange of tokens, against plain float32 on the CPU."""

import pytest
import torch
from transformers import AutoConfig

from tests.gpu.alone import run_apart

pytestmark = pytest.mark.nightly("verl/models/mixture", "verl/distributed")

TOKENS, TOP_K = 40, 2
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {"cpu": 1e-6, "cuda": 2e-2}  # relative to the norm; bfloat16 keeps 8 bits


def small_config():
    return AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=TOP_K,
    )  # fmt: skip


def results(module, hidden, chosen, weights):
    """Output, and gradients of the tokens and of both parameters."""
    hidden = hidden.clone().requires_grad_()
    out = module(hidden, chosen, weights)
    out.square().sum().backward()
    grads = [param.grad for param in (module.gate_up_proj, module.down_proj)]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    return [tensor.float().cpu() for tensor in (out.detach(), hidden.grad, *local)]


def differences(device):
    from verl.config.model import FSDPConfig
    from verl.distributed.fsdp import make_mesh, shard_model, sharded_parameters
    from verl.models.hub_names import auto_class, meta_model
    from verl.models.mixture.experts import divide_over_ranks

    config, dtype = small_config(), DTYPE[device]
    torch.manual_seed(0)
    plain = auto_class(config).from_config(config, dtype=torch.float32)
    model, mesh = meta_model(config, dtype), make_mesh(1, -1, device)
    experts, expert_mesh = divide_over_ranks(model, mesh, 1)
    number = "fp32" if dtype == torch.float32 else "bf16"
    options = FSDPConfig(mp_param_dtype=number, mp_reduce_dtype="fp32")
    shard_model(model, mesh, options, experts=experts, expert_mesh=expert_mesh)
    model.to_empty(device=device)
    given = dict(plain.named_parameters())
    with torch.no_grad():
        for name, param in sharded_parameters(model).items():
            param.to_local().copy_(given[name])
    hidden, weights = torch.randn(TOKENS, 128), torch.rand(TOKENS, TOP_K)
    chosen = torch.randint(6, (TOKENS, TOP_K))  # two experts get no token
    expected = results(plain.model.layers[0].mlp.experts, hidden, chosen, weights)
    inputs = [tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in (hidden, chosen)]
    found = results(experts[0], *inputs, weights.to(device, dtype))
    relative = [
        ((one - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True)
    ]
    model.zero_grad()
    none = results(experts[0], inputs[0][:0], inputs[1][:0], weights[:0].to(device, dtype))
    return relative, [tuple(tensor.shape) for tensor in none], max(grad.abs().max() for grad in none[2:])


@pytest.fixture(scope="module")
def found(device):
    return run_apart(differences, device, device=device)


def test_divided_experts_compute_and_learn_as_plain_ones(found, device):
    assert max(found[0]) < TOLERANCE[device]


def test_experts_without_tokens_have_gradients_of_zero(found):
    _, shapes, largest = found

    assert shapes[0] == (0, 128)
    assert largest == 0
