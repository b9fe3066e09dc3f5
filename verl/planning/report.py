# SPDX-License-Identifier: Apache-2.0
"""The memory of a run as `--dry-run` prints it, and the micro batch sizes that follow from it at start."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from verl.config.schema import value_at
from verl.config.trainer import RunTree
from verl.planning.machine import GIB, Machine, find_machine
from verl.planning.memory_plan import Planner
from verl.planning.phases import MemoryPlan, Phase
from verl.planning.planned_run import PlannedRun
from verl.planning.remedies import misfit_text, settled
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

C = TypeVar("C", bound=RunTree)
Describe = Callable[[C], PlannedRun]  # `planned_ppo` or `planned_sft`

CONFIG_FILE = "config.json"
MIN_SHOWN = GIB // 20  # smaller parts of a phase are left out of its line


def resolve_auto_sizes(config: C, describe: Describe[C], device: str) -> C:
    """The config that the workers get: with a number for each micro batch size that is `auto`.

    Args:
        config: Of the run.
        describe: Says what its memory follows from.
        device: "cuda" or "cpu".

    Raises:
        ValueError: Not even one sequence fits; the error names what would help.
    """
    unset = describe(config).unset_sizes()
    if not unset:
        return config
    machine = find_machine(device)
    chosen = settled(config, make_planner(describe, machine))
    for key in unset:
        logger.info("micro batch size that fits: %s=%d memory=%r", key, value_at(chosen, key), machine.name)
    return chosen


def make_planner(describe: Describe[C], machine: Machine) -> Planner[C]:
    """What plans the memory of this run and of changed ones; reads the models' configs, each once."""
    from verl.planning.model_sizes import read_shape  # noqa: PLC0415 - a config is checked without torch

    shapes = {}

    def read(model, fsdp, **options):  # noqa: ANN001, ANN003, ANN202 - as `read_shape`
        key = repr((model, fsdp.torch_dtype, options))
        if key not in shapes:
            shapes[key] = read_shape(model, fsdp, **options)
        return shapes[key]

    return Planner(describe, read, machine)


def dry_run_memory(config: C, describe: Describe[C], memory_gb: float | None = None) -> tuple[C, str]:
    """The run with its micro batch sizes, and what it takes as text.

    Args:
        config: Of the run.
        describe: Says what its memory follows from.
        memory_gb: GiB of a GPU, or on CPU of a node; None plans for this machine.

    Returns:
        The config with numbers in place of `auto`, as it is if they cannot be known here; and the text.
    """
    run = describe(config)
    for option, path in _missing_configs(run):
        return config, (
            f"  not planned: `{option}` ({path}) has no {CONFIG_FILE} on this machine, which the sizes are"
            f" read from:\n  hf download {path} {CONFIG_FILE}\n"
        )
    try:
        plan = make_planner(describe, find_machine(config.trainer.device, memory_gb))
        chosen = settled(config, plan)
    except ValueError as error:
        return config, f"  {error}\n"
    text = memory_text(chosen, plan)
    for key in run.unset_sizes():
        text += f"  auto: {key}={value_at(chosen, key)}\n"
    return chosen, text


def memory_text(config: C, plan: Planner[C]) -> str:
    """The plan as a table with one line for each phase, and what does not fit."""
    found = plan(config)
    machine, text = found.machine, "".join(f"  {line}\n" for line in found.trained)
    unit = "a process" if machine.device == "cpu" else "a GPU"
    lines = [("GiB", unit, "a node", "")]
    lines += [_phase_line(phase, found) for phase in found.phases]
    there = "-" if machine.device == "cpu" else _gib(machine.device_bytes)
    lines.append(("there is", there, _gib(machine.host_bytes), f"{machine.name}; a tenth is kept free"))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for name, device, node, remark in lines:
        cells = (name.ljust(widths[0]), device.rjust(widths[1]), node.rjust(widths[2]), remark)
        text += f"  {'  '.join(cells)}".rstrip() + "\n"
    for phase in found.misfits():
        text += f"  does not fit: {misfit_text(config, phase, found, plan)}\n"
    return text


def _phase_line(phase: Phase, plan: MemoryPlan) -> tuple[str, str, str, str]:
    parts = sorted((*phase.device, *phase.host), key=lambda item: -item.size)
    shown = ", ".join(f"{item.name} {_gib(item.size)}" for item in parts if item.size >= MIN_SHOWN)
    device = phase.device_bytes
    if plan.machine.device == "cpu":
        device += sum(item.size for item in phase.host)
    return phase.name, _gib(device), _gib(plan.node_bytes(phase)), shown


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _missing_configs(run: PlannedRun) -> Iterator[tuple[str, str]]:
    """Models whose config is neither in a folder nor in the hub's cache, by their options."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - `--help` needs no client of the hub

    for planned in run.models:
        path = planned.model.model_path
        if path is None or (Path(path) / CONFIG_FILE).is_file():
            continue
        if Path(path).is_dir() or not isinstance(try_to_load_from_cache(path, CONFIG_FILE), str):
            yield f"worker.{planned.role}.model.model_path", path
