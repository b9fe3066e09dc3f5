# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.optimizers import has_torchao, needs_torchao

pytestmark = needs_torchao
if has_torchao():
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    from verl.optim import adamw_8bit
    from verl.optim.adamw_8bit import AdamW8bit, block_size


def steps(optimizer: torch.optim.Optimizer, param: Tensor, number: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(number):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def start(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).to(dtype))


def test_with_equal_blocks_it_matches_torchao():
    ours, theirs = start(16, 512), start(16, 512)
    options = dict(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    steps(AdamW8bit([ours], **options), ours, 5)
    with torch.compiler.set_stance("force_eager"):
        steps(TorchaoAdamW8bit([theirs], **options), theirs, 5)

    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_it_follows_adamw_within_its_precision():
    ours, theirs = start(8, 600), start(8, 600)
    before = ours.detach().clone()
    for optimizer, param in ((AdamW8bit, ours), (torch.optim.AdamW, theirs)):
        steps(optimizer([param], lr=1e-2, weight_decay=0.0), param, 10)

    moved = (theirs - before).norm()
    assert 0 < (ours - theirs).norm() / moved < 0.1


def test_a_block_is_the_largest_divisor_of_a_row_and_small_tensors_have_none():
    # 600 = 3 * 200; 896 = 4 * 224; 3584 = 14 * 256; a row of 521 (prime) has no divisor from 64 to 256.
    shapes = {(8, 600): 200, (8, 896): 224, (2, 3584): 256, (2, 14, 256): 256, (8, 521): None}
    small = {(5000,): None, (4, 256): None}

    for shape, expected in (shapes | small).items():
        assert block_size(torch.Size(shape)) == expected


def test_small_and_indivisible_tensors_are_updated_by_float32_adamw():
    ours, theirs = start(8, 521), start(8, 521)
    for optimizer, param in ((AdamW8bit, ours), (torch.optim.AdamW, theirs)):
        steps(optimizer([param], lr=1e-2, weight_decay=0.1), param, 5)

    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_bfloat16_weights_are_rounded_stochastically_without_changing_the_global_generator():
    # 200 updates of 1e-4 move a float32 weight to 0.98; rounded to the nearest it would stay at 1.
    weight = nn.Parameter(torch.ones(16, 256, dtype=torch.bfloat16))
    optimizer = AdamW8bit([weight], lr=1e-4, weight_decay=0.0)
    before = torch.get_rng_state()

    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    assert abs(weight.float().mean().item() - 0.98) < 1e-3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_the_compiled_update_equals_the_eager_one(monkeypatch):
    # A number between two codes may round to either, since a compiled update rounds less often.
    eager, compiled = start(8, 600), start(8, 600)
    options = dict(lr=1e-2, weight_decay=0.1)
    steps(AdamW8bit([eager], **options), eager, 3)
    kernel = adamw_8bit.update_kernel
    monkeypatch.setattr(adamw_8bit, "update_kernel", lambda is_compiled: kernel(True))
    steps(AdamW8bit([compiled], **options), compiled, 3)

    assert not torch.equal(compiled, start(8, 600))
    differs = (compiled - eager).abs() > 1e-6
    assert differs.float().mean() < 0.01
    assert (compiled - eager).abs().max() < 1e-2
