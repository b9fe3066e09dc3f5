# SPDX-License-Identifier: Apache-2.0
"""Checks of schedules, optimizers and model families, with a tiny model or prompt."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.config.schema import value_at
from verl.models.families.interface import Family, MediaShape
from verl.models.families.registry import register_family
from verl.optim.build import parameter_groups
from verl.optim.schedules import Position
from verl.trainer.extensions.protocol import ProtocolError, UsedExtension, check_tensor, described

STEPS, WARMUP = 20, 2  # of the run that a schedule is called for
LENGTH = 3  # tokens of a tiny prompt
IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN = 90, 91, 92  # of a tiny model


def check_schedule(schedule: Any, used: UsedExtension, config: Any) -> None:
    """Call a schedule for each step after the warm-up of a short run."""
    optim = value_at(config, used.option.rpartition(".")[0])
    for step in range(WARMUP, STEPS + 1):
        height = schedule(Position(step, WARMUP, STEPS), optim)
        where = f"at step {step} of {STEPS}"
        if isinstance(height, bool) or not isinstance(height, int | float):
            raise ProtocolError(f"must return a number, got {described(height)} {where}")
        if not 0 <= height < math.inf:
            raise ProtocolError(f"must return a finite factor of at least 0, got {height} {where}")


def check_optimizer(build: Any, used: UsedExtension, config: Any) -> None:
    """Take two steps with an optimizer on a tiny model, and look at its state."""
    optim = replace(value_at(config, used.option.rpartition(".")[0]), lr=0.01, lr_factors={})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = build(model, parameter_groups(model, optim.lr, {}, used.option), optim)
    if not isinstance(optimizer, Optimizer):
        raise ProtocolError(f"must return a torch.optim.Optimizer, got {described(optimizer)}")
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, param in model.named_parameters() if id(param) not in held]
    if missing:
        raise ProtocolError(f"must hold every parameter of the groups, and lacks {missing}")
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    for (name, param), old in zip(model.named_parameters(), before, strict=True):
        if not param.isfinite().all():
            raise ProtocolError(f"must keep parameters finite, and {name} is not after two steps")
        if param.equal(old):
            raise ProtocolError(f"must change every parameter, and {name} is the same after two steps")
        _check_state(name, param, optimizer.state[param])


def check_family(family: Any, used: UsedExtension, _config: Any) -> None:
    """Compute positions of a short prompt without media."""
    if not isinstance(family, Family):
        raise ProtocolError(f"must be a Family, got {described(family)}")
    register_family(used.spec)
    vision = SimpleNamespace(spatial_merge_size=2)
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "audio_token_id": AUDIO_TOKEN}
    config = SimpleNamespace(**tokens, vision_config=vision)
    positions = family.positions(config, torch.arange(LENGTH), MediaShape())
    if positions is None:
        return
    rows = family.position_rows
    check_tensor("the position ids", positions, (rows, LENGTH) if rows > 1 else (LENGTH,), torch.int64)


def _check_state(name: str, param: Tensor, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor):
            fits = value.ndim == 0 or value.shape == param.shape or value.shape[0] == param.shape[0]
        else:
            fits = isinstance(value, int | float)
        if not fits:
            raise ProtocolError(
                "must keep state of a parameter's shape, with as many rows, or a number, so that it can be"
                f" saved and sharded; `{key}` of {name} {tuple(param.shape)} is {described(value)}"
            )
