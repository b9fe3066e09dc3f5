# SPDX-License-Identifier: Apache-2.0
"""Which options make a phase fit that does not, with values that do; and the micro batch sizes of `auto`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from verl.config.schema import value_at
from verl.planning.machine import GIB
from verl.planning.memory_plan import Planner
from verl.planning.phases import MemoryPlan, Phase
from verl.planning.planned_run import PlannedRun

C = TypeVar("C")  # a config tree
Changes = dict[str, Any]  # options by their keys

ENGINE_SHARE = "worker.rollout.gpu_memory_utilization"


def with_options(config: C, changes: Mapping[str, Any]) -> C:
    """A config with some options replaced; the given one stays as it is."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        inner = with_options(getattr(config, name), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: inner})  # pyright: ignore[reportArgumentType] (a section)
    return config


def settled(config: C, plan: Planner[C]) -> C:
    """The run with a number for each micro batch size that is `auto`: the largest whose phases fit.

    A size divides the sequences that it cuts, so that no micro batch is smaller than another.

    Args:
        config: Of the run.
        plan: Of its memory.

    Raises:
        ValueError: Not even one sequence fits, or something else does not; names what would help.
    """
    run = plan.describe(config)
    unset = run.unset_sizes()
    config = with_options(config, dict.fromkeys(unset, 1))
    smallest = plan(config)
    for phase in smallest.misfits():
        if phase.size_option in unset:
            raise ValueError(
                f"`{phase.size_option}` (auto): not even one sequence fits:"
                f" {misfit_text(config, phase, smallest, plan)}"
            )
    for key in unset:
        fitting = (size for size in run.sizes(key) if _fits(config, {key: size}, key, plan))
        config = with_options(config, {key: next(fitting)})
    return config


def misfit_text(config: C, phase: Phase, found: MemoryPlan, plan: Planner[C]) -> str:
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


def remedy(config: C, phase: Phase, plan: Planner[C]) -> Changes:
    """The gentlest change that makes a phase fit: one option if one does, else several; {} if none do."""
    together: Changes = {}
    options = list(_knobs(config, plan.describe(config), phase))
    for changes in options:
        if _phase_fits(config, changes, phase.name, plan):
            return changes
    for changes in options:
        together |= changes
        if _phase_fits(config, together, phase.name, plan):
            return together
    return {}


def _knobs(config: Any, run: PlannedRun, phase: Phase) -> Iterator[Changes]:
    """Options that lower a phase, the gentlest first."""
    if phase.size_option is not None:
        now = value_at(config, phase.size_option)
        yield from ({phase.size_option: size} for size in run.sizes(phase.size_option) if size < now)
    if phase.updates is not None:
        yield {f"worker.{phase.updates}.model.enable_gradient_checkpointing": True}
    if phase.name == "gen":
        now = value_at(config, ENGINE_SHARE)
        shares = (round(0.05 * step, 2) for step in range(int(now / 0.05), 3, -1))
        yield from ({ENGINE_SHARE: share} for share in shares if share < now)
    yield {f"worker.{role}.offload.offload_optimizer": True for role in run.roles(trained_only=True)}
    yield {f"worker.{role}.offload.offload_params": True for role in run.roles()}
    if phase.updates is not None:
        section = f"worker.{phase.updates}"
        yield {f"{section}.fsdp.torch_dtype": "bf16", f"{section}.optim.strategy": "adamw_bf16"}
    if run.trainer.async_save:
        yield {"trainer.async_save": False}


def _fits(config: C, changes: Changes, size_option: str, plan: Planner[C]) -> bool:
    found = plan(with_options(config, changes))
    return all(found.is_within(phase) for phase in found.phases if phase.size_option == size_option)


def _phase_fits(config: C, changes: Changes, name: str, plan: Planner[C]) -> bool:
    found = plan(with_options(config, changes))
    return all(found.is_within(phase) for phase in found.phases if phase.name == name)
