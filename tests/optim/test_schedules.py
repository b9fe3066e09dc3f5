# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from verl.config.model import OptimConfig
from verl.optim.schedules import build_scheduler


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


def test_warm_up_rises_linearly_from_zero_to_the_peak():
    assert rates(OptimConfig(lr=1.0, lr_warmup_ratio=0.4), 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_warm_up_steps_override_the_ratio():
    assert rates(OptimConfig(lr=1.0, lr_warmup_ratio=0.4, lr_warmup_steps=2), 4) == [0.0, 0.5, 1.0, 1.0]


def test_cosine_decays_to_the_minimum_ratio_and_stays():
    # After 2 steps of warm-up 8 remain; half way the cosine is at 0.2 + 0.8 / 2.
    seen = rates(OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.2), 13)

    assert seen[2] == pytest.approx(1.0)
    assert seen[6] == pytest.approx(0.6)
    assert seen[10:] == pytest.approx([0.2, 0.2, 0.2])


def test_a_resumed_schedule_continues_with_a_new_learning_rate():
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


def test_linear_decays_from_the_end_of_the_warm_up_to_the_end_of_the_run():
    # After 2 steps of warm-up 8 remain; each takes an eighth of what is above 0.2.
    seen = rates(OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.2), 12)

    assert seen[:4] == pytest.approx([0.0, 0.5, 1.0, 0.9])
    assert seen[6:] == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.2])


@pytest.mark.parametrize(("shape", "half_way"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_wsd_stays_at_the_peak_and_decays_in_the_last_steps(shape, half_way):
    # The decay takes 0.4 of 10 steps: from step 6, half way at step 8, done at step 10.
    config = OptimConfig(
        lr=2.0, lr_warmup_steps=1, lr_scheduler_type="wsd", lr_decay_ratio=0.4, lr_decay_shape=shape
    )

    seen = rates(config, 12)

    assert seen[:7] == [0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert seen[8] == pytest.approx(2 * half_way)
    assert seen[10:] == pytest.approx([0.0, 0.0], abs=1e-12)


def test_decay_shapes_differ_after_a_quarter_of_the_decay():
    # 1 - 1/4; (1 + cos(pi/4)) / 2; 1 - 1/2. The decay takes steps 6 to 10, so a quarter is step 7.
    for shape, height in (("linear", 0.75), ("cosine", 0.5 + 0.5**1.5), ("sqrt", 0.5)):
        config = OptimConfig(
            lr=1.0, min_lr_ratio=0.5, lr_scheduler_type="wsd", lr_decay_ratio=0.4, lr_decay_shape=shape
        )
        assert rates(config, 8)[7] == pytest.approx(0.5 + 0.5 * height)


def test_a_decay_longer_than_the_rest_of_the_run_starts_after_the_warm_up():
    config = OptimConfig(
        lr=1.0, lr_warmup_steps=6, lr_scheduler_type="wsd", lr_decay_ratio=1.0, lr_decay_shape="linear"
    )

    assert rates(config, 11)[5:] == pytest.approx([5 / 6, 1.0, 0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_every_schedule_resumes_at_its_position_for_every_group(name):
    config = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type=name, lr_decay_ratio=0.5)

    def start() -> tuple:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1.0, 0.1)]
        optimizer = torch.optim.SGD(groups)
        return optimizer, build_scheduler(optimizer, config, 10)

    def run(optimizer, scheduler, steps: int) -> list[list[float]]:
        seen = []
        for _ in range(steps):
            seen.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        return seen

    stopped, resumed = start(), start()
    unbroken = run(*start(), 9)
    run(*stopped, 6)
    resumed[1].load_state_dict(stopped[1].state_dict())

    assert run(*resumed, 3) == unbroken[6:]
    assert all(second == 0.1 * first for first, second in unbroken)
