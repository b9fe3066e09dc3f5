# SPDX-License-Identifier: Apache-2.0
"""Experts of every kind of mixture with transformers' interface, divided over two ranks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.causal_families import FAMILIES, SMALL, build_family
from tests.helpers.distributed import run_distributed
from verl.models.mixture.experts import check_divisible, divide_over_ranks, expert_modules

TOKENS, TOP_K = 12, 2
OF_THEIR_OWN = {"jetmoe", "llama4_text"}  # mixtures whose experts have no joint forward pass of transformers


def on_meta_device(name):
    config = AutoConfig.for_model(name, **SMALL | FAMILIES[name])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


def mixtures():
    return [name for name in FAMILIES if expert_modules(on_meta_device(name))]


def results(module, rank, world_size):
    """Output of this rank's tokens, and the gradients of its experts' parameters and of the tokens."""
    generator = torch.Generator().manual_seed(0)
    width = module.hidden_dim if hasattr(module, "hidden_dim") else module.hidden_size
    hidden = torch.randn(TOKENS, width, generator=generator)[rank::world_size].clone().requires_grad_()
    # Uneven: the second half of the experts gets a few tokens of the first rank only.
    chosen = torch.tensor([[0, 1], [1, 0], [2, 0], [1, 0], [3, 2], [0, 1]] * 2)[rank::world_size]
    weights = torch.rand(TOKENS, TOP_K, generator=generator)[rank::world_size]
    out = module(hidden, chosen, weights)
    out.square().sum().backward()
    grads = {name: param.grad for name, param in module.named_parameters()}
    return out.detach(), hidden.grad, grads


def compare(rank, world_size, names):
    found = {}
    for name in names:
        plain, model = build_family(name, FAMILIES[name]), on_meta_device(name)
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        [module, *_], _ = divide_over_ranks(model, mesh, world_size)
        module.to_empty(device="cpu")
        whole = expert_modules(plain)[0]
        for parameter, param in whole.named_parameters():
            torch.nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(1))
            part = param.detach().chunk(world_size)[rank]
            module.get_parameter(parameter).to_local().detach().copy_(part)
        expected, found_here = results(whole, 0, 1), results(module, rank, world_size)
        errors = [
            (found_here[number] - expected[number][rank::world_size]).abs().max().item() for number in (0, 1)
        ]
        # Gradients are those of the mean over ranks.
        errors += [
            (grad.to_local() * world_size - expected[2][parameter].chunk(world_size)[rank]).abs().max().item()
            for parameter, grad in found_here[2].items()
        ]
        found[name] = max(errors)
    return found


@pytest.mark.heavy
@pytest.mark.slow  # tests/equivalence divides Qwen's in every suite
def test_experts_of_every_mixture_compute_and_learn_the_same_on_two_ranks():
    names = mixtures()

    assert len(names) > 20
    for found in run_distributed(compare, 2, names):
        assert all(error < 1e-4 for error in found.values()), found


@pytest.mark.parametrize("name", sorted(OF_THEIR_OWN))
def test_mixtures_without_the_interface_are_refused(name):
    with pytest.raises(ValueError, match=r"`fsdp.expert_parallel_size` \(2\) must be 1 for .*, which has"):
        check_divisible(on_meta_device(name), 2, "fsdp.expert_parallel_size")
