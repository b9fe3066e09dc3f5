# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from verl.utils.optim import AnyPrecisionAdamW, build_optimizer, build_scheduler
from verl.workers.config import OptimConfig


def rates(config: OptimConfig, steps: int, training_steps: int = 10) -> list[float]:
    """The learning rate at steps 0, 1, …"""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = build_scheduler(optimizer, config, training_steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_warm_up_rises_linearly_from_zero_then_stays():
    assert rates(OptimConfig(lr=1.0, lr_warmup_ratio=0.4), 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_warm_up_steps_win_over_the_ratio():
    assert rates(OptimConfig(lr=1.0, lr_warmup_ratio=0.4, lr_warmup_steps=2), 4) == [0.0, 0.5, 1.0, 1.0]


def test_cosine_falls_to_the_lowest_ratio_and_stays():
    # After 2 steps of warm-up 8 remain; half way the cosine is at 0.2 + 0.8 / 2.
    seen = rates(OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.2), 13)

    assert seen[2] == pytest.approx(1.0)
    assert seen[6] == pytest.approx(0.6)
    assert seen[10:] == pytest.approx([0.2, 0.2, 0.2])


def test_a_resumed_schedule_continues_and_listens_to_a_new_learning_rate():
    config = OptimConfig(lr=1.0, lr_warmup_steps=4)
    whole = rates(config, 6)
    first = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(first, config, 10)
    for _ in range(3):
        first.step()
        scheduler.step()

    second = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    resumed = build_scheduler(second, OptimConfig(lr=2.0, lr_warmup_steps=4), 10)
    resumed.load_state_dict(scheduler.state_dict())

    assert second.param_groups[0]["lr"] == 2 * whole[3]
    assert resumed.get_last_lr() == [2 * whole[3]]
    second.step()
    resumed.step()
    assert second.param_groups[0]["lr"] == 2 * whole[4]


def test_any_precision_adamw_is_adamw_on_float32_weights():
    torch.manual_seed(0)
    start = torch.randn(40)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = dict(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    optimizers = AnyPrecisionAdamW([ours], **options), torch.optim.AdamW([theirs], **options)

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


def test_only_trained_weights_are_optimized_and_none_is_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)

    optimizer = build_optimizer(model, OptimConfig(strategy="adamw_bf16"))

    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [
        id(param) for param in model[1].parameters()
    ]
    with pytest.raises(ValueError, match="everything is frozen"):
        build_optimizer(model.requires_grad_(False), OptimConfig())
