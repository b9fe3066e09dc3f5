# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from verl.optim.adamw import AnyPrecisionAdamW, StochasticAdamW, stochastic_bf16


@pytest.mark.parametrize("kind", [AnyPrecisionAdamW, StochasticAdamW])
def test_each_optimizer_equals_adamw_on_float32_weights(kind):
    torch.manual_seed(0)
    start = torch.randn(40)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = dict(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    optimizers = kind([ours], **options), torch.optim.AdamW([theirs], **options)

    for _ in range(20):
        grad = torch.randn(40)
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()

    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_the_first_step_moves_each_weight_by_the_learning_rate_against_the_gradients_sign():
    # m / (1 - b1) = g and v / (1 - b2) = g^2, so the step is lr * sign(g); decay adds lr * 0.5 * weight.
    weight = nn.Parameter(torch.tensor([2.0, 2.0], dtype=torch.bfloat16))
    weight.grad = torch.tensor([4.0, -4.0], dtype=torch.bfloat16)

    AnyPrecisionAdamW([weight], lr=0.25, weight_decay=0.5).step()

    assert weight.tolist() == [2.0 - 0.25 - 0.25, 2.0 + 0.25 - 0.25]


def test_updates_too_small_for_bfloat16_are_not_lost():
    # bfloat16 near 1 has steps of 2^-8 below and 2^-7 above; 200 updates of 1e-4 move a float32 weight to
    # 0.98.
    kept = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizers = (
        AnyPrecisionAdamW([kept], lr=1e-4, weight_decay=0.0),
        torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0),
    )

    for _ in range(200):
        for param, optimizer in zip((kept, plain), optimizers, strict=True):
            param.grad = torch.ones_like(param)
            optimizer.step()

    assert kept.float().sub(0.98).abs().max() < 2**-8
    assert plain.eq(1.0).all()


def test_bfloat16_training_follows_float32_adamw_closely():
    torch.manual_seed(0)
    inputs, target = torch.randn(64, 16), torch.randn(64, 1)
    exact, half = nn.Linear(16, 1), nn.Linear(16, 1)
    half.load_state_dict(exact.state_dict())
    half.bfloat16()
    optimizers = (
        torch.optim.AdamW(exact.parameters(), lr=1e-3),
        AnyPrecisionAdamW(half.parameters(), lr=1e-3),
    )

    for _ in range(300):
        for model, optimizer in zip((exact, half), optimizers, strict=True):
            optimizer.zero_grad()
            (model(inputs.to(model.weight.dtype)).float() - target).square().mean().backward()
            optimizer.step()

    torch.testing.assert_close(half.weight.float(), exact.weight, atol=0.02, rtol=0.02)


def test_stochastic_rounding_gives_a_neighbor_and_the_number_on_average():
    # Between 1 and 1 + 2^-7 a quarter of the way: up with probability 1/4.
    exact = torch.full((40_000,), 1 + 2**-9)

    rounded = stochastic_bf16(exact, torch.Generator().manual_seed(0))

    assert rounded.dtype == torch.bfloat16
    assert rounded.unique().tolist() == [1.0, 1 + 2**-7]
    share = (rounded > 1).float().mean().item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 40_000) ** 0.5  # five standard deviations


def test_stochastic_rounding_keeps_bfloat16_numbers_and_the_sign():
    kept = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf")])

    assert stochastic_bf16(kept, torch.Generator()).tolist() == kept.tolist()
    below = stochastic_bf16(torch.full((1000,), -1 - 2**-8), torch.Generator())
    assert below.unique().tolist() == [-1 - 2**-7, -1.0]
    assert stochastic_bf16(torch.tensor([float("nan")]), torch.Generator()).isnan().all()


def test_with_stochastic_rounding_small_updates_are_applied_on_average():
    # 200 updates of 1e-4 move a float32 weight to 0.98; the mean of 4096 weights with steps of 2^-8 is close.
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-4, weight_decay=0.0)

    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    assert abs(weight.float().mean().item() - 0.98) < 5e-4


def test_the_second_moment_of_bfloat16_decays_under_stochastic_rounding():
    # After a gradient of 1 and 999 of 0 it is 0.001 * 0.999^999 = 3.7e-4; rounded to the nearest it would
    # stay at 0.001, as 0.999 of a number of 8 bits is nearest to the number.
    weight = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=0.0, betas=(0.9, 0.999))

    for step in range(1000):
        weight.grad = torch.full_like(weight, float(step == 0))
        optimizer.step()

    mean = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    assert abs(mean / (0.001 * 0.999**999) - 1) < 0.01
    nearest = torch.tensor(0.001, dtype=torch.bfloat16)
    assert (nearest.float() * 0.999).bfloat16() == nearest
