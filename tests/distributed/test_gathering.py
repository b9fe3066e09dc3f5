# SPDX-License-Identifier: Apache-2.0
"""Gathering stacks of experts in slices, compared with torch's gathering of whole tensors."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.distributed import run_distributed
from verl.distributed.expert_parallel import divide_experts, expert_mesh, shard_experts
from verl.distributed.fsdp import make_mesh
from verl.distributed.weights import gathering
from verl.distributed.weights.gathering import ExpertSlice, full_named_tensors, in_pieces

EXPERT_BYTES = 3 * 4 * 2  # (3, 4) in bfloat16
LIMIT = 2 * EXPERT_BYTES + 1  # two experts


class Experts(nn.Module):
    def __init__(self, count, device="cpu"):
        super().__init__()
        self.stack = nn.Parameter(torch.empty(count, 3, 4, device=device))


def sharded(count, fsdp_size, expert_size):
    """A module of experts with random weights, sharded as a worker does."""
    mesh = make_mesh(4, fsdp_size, "cpu")
    if expert_size == 1:
        module = Experts(count)
        fully_shard(module, mesh=mesh)
    else:
        module, divided = Experts(count, "meta"), expert_mesh(mesh, expert_size)
        divide_experts(module, divided)
        shard_experts([module], divided, {"mp_policy": MixedPrecisionPolicy()})
        module.to_empty(device="cpu")
    torch.manual_seed(torch.distributed.get_rank() % fsdp_size)  # equal on ranks with the same shard
    with torch.no_grad():
        module.stack.to_local().normal_()
    return module


def gather_both_ways(rank, world_size, setups):
    """Names and sizes of slices, their sum, and whether it is torch's whole tensor, for each setup."""
    found = []
    for setup in setups:
        torch.distributed.barrier()
        module = sharded(*setup)
        with mock.patch.object(gathering, "gather_whole") as gather_whole:
            slices = list(full_named_tensors(module, torch.bfloat16, stacks=["stack"], slice_bytes=LIMIT))
        assert isinstance(module.stack, DTensor)
        expected = module.stack.detach().to(torch.bfloat16).full_tensor()
        is_equal = torch.equal(torch.cat([tensor for _, tensor in slices]), expected)
        sizes = [tensor.untyped_storage().nbytes() for _, tensor in slices]
        found.append(([name for name, _ in slices], max(sizes), is_equal, gather_whole.call_count))
    return found


# experts, ranks that share a copy, ranks that divide the experts
SETUPS = [(11, 4, 1), (3, 4, 1), (8, 4, 1), (5, 2, 1), (8, 4, 2), (12, 4, 4), (6, 4, 2), (8, 2, 2)]


@pytest.fixture(scope="module")
def gathered():
    return run_distributed(gather_both_ways, 4, SETUPS)


@pytest.mark.parametrize("number", range(len(SETUPS)), ids=map(str, SETUPS))
def test_slices_are_the_stack_and_no_tensor_is_larger_than_the_bound(gathered, number):
    count = SETUPS[number][0]
    names = [f"stack[{start}:{min(start + 2, count)}]" for start in range(0, count, 2)]

    for of_rank in gathered:
        assert of_rank[number] == (names, min(2, count) * EXPERT_BYTES, True, 0)


def test_a_stack_within_the_bound_is_one_slice_and_other_weights_keep_their_names():
    module = nn.Linear(2, 2)
    module.stack = nn.Parameter(torch.randn(4, 3, 4))

    named = dict(full_named_tensors(module, stacks=["stack"]))

    assert named.keys() == {"weight", "bias", "stack[0:4]"}
    assert torch.equal(named["stack[0:4]"], module.stack)


def test_an_expert_larger_than_the_bound_is_a_slice():
    module = Experts(3)

    assert [name for name, _ in full_named_tensors(module, stacks=["stack"], slice_bytes=1)] == [
        "stack[0:1]",
        "stack[1:2]",
        "stack[2:3]",
    ]


def test_pieces_of_a_slice_are_views_of_it_with_the_numbers_of_their_experts():
    stack, other = torch.randn(5, 2), torch.randn(9)

    pieces = list(in_pieces([("a.stack[10:15]", stack), ("b", other)], size=2 * stack[0].nbytes))

    assert [name for name, _ in pieces] == ["a.stack[10:12]", "a.stack[12:14]", "a.stack[14:15]", "b"]
    assert torch.equal(torch.cat([tensor for _, tensor in pieces[:3]]), stack)
    assert pieces[1][1].data_ptr() == stack[2].data_ptr() and pieces[3][1] is other


def test_names_of_slices_are_read_and_others_are_not():
    assert ExpertSlice.of("model.experts.down_proj[64:128]") == ("model.experts.down_proj", 64, 128)
    assert ExpertSlice.of("model.experts.0.down_proj.weight") is None
