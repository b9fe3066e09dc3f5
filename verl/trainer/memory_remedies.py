# SPDX-License-Identifier: Apache-2.0
"""Which options make a phase fit that does not, with values that do; and the micro batch sizes of `auto`."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl.trainer.config import PPOConfig
from verl.trainer.held_models import mini_batch_share, step_share
from verl.trainer.memory_plan import GIB, MemoryPlan, Phase
from verl.utils.config import value_at
from verl.workers.config import AUTO

Planner = Callable[[PPOConfig], MemoryPlan]  # `plan_memory` for one machine
Changes = dict[str, Any]  # options by their keys

REWARD_MODEL_SIZE = "worker.reward_model.micro_batch_size_per_device"


def with_options(config: Any, changes: Mapping[str, Any]) -> Any:
    """A config with some options replaced; the given one stays as it is."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        inner = with_options(getattr(config, name), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: inner})
    return config


def size_options(config: PPOConfig) -> list[str]:
    """The micro batch sizes of the models that the run holds."""
    keys = [
        f"worker.{role}.micro_batch_size_per_device_for_{what}"
        for role in config.trained_roles
        for what in ("update", "experience")
    ]
    return keys + [REWARD_MODEL_SIZE] * config.worker.reward_model.is_used


def settled(config: PPOConfig, plan: Planner) -> PPOConfig:
    """The run with a number for each micro batch size that is `auto`: the largest whose phases fit.

    A size divides the sequences that it cuts, so that no micro batch is smaller than another.

    Args:
        config: Of the run.
        plan: Of its memory.

    Raises:
        ValueError: Not even one sequence fits, or something else does not; names what would help.
    """
    unset = [key for key in size_options(config) if value_at(config, key) == AUTO]
    config = with_options(config, dict.fromkeys(unset, 1))
    smallest = plan(config)
    for phase in smallest.misfits():
        if phase.size_option in unset:
            raise ValueError(
                f"`{phase.size_option}` (auto): not even one sequence fits:"
                f" {misfit_text(config, phase, smallest, plan)}"
            )
    for key in unset:
        fitting = (size for size in _sizes(config, key) if _fits(config, {key: size}, key, plan))
        config = with_options(config, {key: next(fitting)})
    return config


def misfit_text(config: PPOConfig, phase: Phase, found: MemoryPlan, plan: Planner) -> str:
    """What a phase takes, what there is, and which options with which values make it fit."""
    machine = found.machine
    if machine.device == "cuda" and phase.device_bytes > machine.usable_device:
        taken, usable, what = phase.device_bytes, machine.usable_device, "a GPU"
    else:
        taken, usable, what = found.node_bytes(phase), machine.usable_host, "the host memory of a node"
    changes = remedy(config, phase, plan)
    shown = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
    advice = f"set {shown}" if changes else "use more devices (`trainer.nnodes`) or a smaller model"
    return f"{phase.name} takes {taken / GIB:.1f} GiB of {what}, {usable / GIB:.1f} are usable: {advice}"


def remedy(config: PPOConfig, phase: Phase, plan: Planner) -> Changes:
    """The gentlest change that makes a phase fit: one option if one does, else several; {} if none do."""
    together: Changes = {}
    options = list(_knobs(config, phase))
    for changes in options:
        if _phase_fits(config, changes, phase.name, plan):
            return changes
    for changes in options:
        together |= changes
        if _phase_fits(config, together, phase.name, plan):
            return together
    return {}


def _knobs(config: PPOConfig, phase: Phase) -> Iterator[Changes]:
    """Options that lower a phase, the gentlest first."""
    if phase.size_option is not None:
        now = value_at(config, phase.size_option)
        yield from ({phase.size_option: size} for size in _sizes(config, phase.size_option) if size < now)
    role = phase.name.removeprefix("update_")
    if phase.name.startswith("update_"):
        yield {f"worker.{role}.model.enable_gradient_checkpointing": True}
    if phase.name == "gen":
        now = config.worker.rollout.gpu_memory_utilization
        shares = (round(0.05 * step, 2) for step in range(int(now / 0.05), 3, -1))
        yield from ({"worker.rollout.gpu_memory_utilization": share} for share in shares if share < now)
    yield {f"worker.{name}.offload.offload_optimizer": True for name in config.trained_roles}
    yield {f"worker.{name}.offload.offload_params": True for name in config.models}
    if phase.name.startswith("update_"):
        yield {f"worker.{role}.fsdp.torch_dtype": "bf16", f"worker.{role}.optim.strategy": "adamw_bf16"}
    if config.trainer.async_save:
        yield {"trainer.async_save": False}


def _sizes(config: PPOConfig, key: str) -> list[int]:
    """Sizes that a micro batch may have, the largest first."""
    is_update = key.endswith("_update")
    rows = mini_batch_share(config, key.split(".")[1]) if is_update else step_share(config)
    return [size for size in range(rows, 0, -1) if rows % size == 0]


def _fits(config: PPOConfig, changes: Changes, size_option: str, plan: Planner) -> bool:
    found = plan(with_options(config, changes))
    return all(found.is_within(phase) for phase in found.phases if phase.size_option == size_option)


def _phase_fits(config: PPOConfig, changes: Changes, name: str, plan: Planner) -> bool:
    found = plan(with_options(config, changes))
    return all(found.is_within(phase) for phase in found.phases if phase.name == name)
