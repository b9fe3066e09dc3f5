# SPDX-License-Identifier: Apache-2.0
"""Values of the switches that are `auto`, by the device, the model and the plan of memory.

A choice changes no loss, except for the rounding of compiled blocks. On a CPU, and without a plan, a switch
keeps the value in `CAUTIOUS`, which needs the least memory and nothing else. Needs no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from verl.checkpoint.manifest import ORIGIN, STATE_FILE
from verl.checkpoint.tracker import find_last_checkpoint, read_record
from verl.config.files.model_files import CONFIG, local_folder, read_json
from verl.config.model import AUTO, ModelConfig
from verl.config.schema import list_options, value_at
from verl.config.trainer import RunConfig, RunTree
from verl.distributed.backends import BACKENDS
from verl.planning.machine import Machine, MemoryPlan
from verl.planning.memory_plan import Planner
from verl.planning.planned_run import PlannedRun, with_options

C = TypeVar("C", bound=RunTree)

TEXT_CONFIGS = ("text_config", "llm_config")  # entries of a model's config for its language model

COMPILE, RECOMPUTE = "model.compile_blocks", "model.enable_gradient_checkpointing"
CAUTIOUS: Mapping[str, Any] = {  # by the ends of the options' names, in the order in which they are chosen
    "offload.offload_params": True,
    "offload.offload_optimizer": True,
    COMPILE: False,
    RECOMPUTE: True,
}
AS_RECORDED = "as in the checkpoint"  # a reason
SHARES = (False, 0.25, 0.5, 0.75)  # of recomputed blocks

# Types of language models whose blocks may be compiled, or recomputed in part; the file names the tests.
TESTED = frozenset(
    line
    for line in Path(__file__).with_name("tested_blocks.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


@dataclass(frozen=True)
class Choice:
    """The value of a switch that was `auto`, and why it is not another."""

    value: Any
    reason: str = ""

    def __str__(self) -> str:
        return f"{str(self.value).lower()}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True)
class Chosen(Generic[C]):
    """A config without `auto` in the switches of its models, and the choices by option."""

    config: C
    choices: Mapping[str, Choice] = field(default_factory=dict)


def open_switches(cls: type[RunTree], run: PlannedRun) -> dict[str, Any]:
    """Return the cautious values of the switches that are `auto`, of all models of a run."""
    known, policy = {entry.key for entry in list_options(cls)}, run.planned_models[0]
    own = {  # a model without a section or a path has the policy's options
        each.section
        for each in run.planned_models
        if f"{each.section}.{COMPILE}" in known and (each is policy or each.model is not policy.model)
    }
    return {
        f"{each.section}.{name}": value
        for name, value in CAUTIOUS.items()
        for each in run.planned_models
        if (each.section in own or name not in (COMPILE, RECOMPUTE)) and value_at(each, name) == AUTO
    }


def choose(
    config: C,
    switches: Mapping[str, Any],
    planner: Planner[C],
    recorded: Mapping[str, Any],
) -> Chosen[C]:
    """Choose for each switch the value that is best for speed and adds no phase that does not fit.

    In `config` they have their cautious values, and micro batch sizes are numbers. A value that a checkpoint
    has `recorded` comes first, if it still fits.
    """
    before_any, run = planner(config), planner.describe(config)
    choices: dict[str, Choice] = {}
    for key, value_before in switches.items():
        reason, values = _candidates(run, key, planner.machine)
        before = _recorded_value(recorded, key)
        values = [before, *values] if before in (*values, value_before) else values
        for value in values:
            changed = with_options(config, {key: value})
            if is_no_worse(planner(changed), before_any):
                is_repeated = value == before
                config, choices[key] = changed, Choice(value, reason or (AS_RECORDED if is_repeated else ""))
                break
        else:
            choices[key] = Choice(value_before, reason or "more would not fit")
    return Chosen(config, choices)


def recorded_options(
    trainer: RunConfig, find: Callable[[str], Path | None] = find_last_checkpoint
) -> dict[str, Any]:
    """Return the options of the checkpoint that a run resumes from; none for a run that starts.

    Files that are missing there are named when the run resumes.
    """
    folder = Path(trainer.load_checkpoint_path) if trainer.load_checkpoint_path else None
    if folder is None and trainer.find_last_checkpoint:
        folder = find(trainer.checkpoint_folder)
    state = read_json(folder / STATE_FILE) if folder else None
    return ((state or {}).get(ORIGIN) or {}).get("options", {})


def look_up_last(root: str) -> Path | None:
    """Return where the newest checkpoint belongs, without putting one there that was interrupted."""
    record = read_record(root)
    if record is None or record.last_global_step is None:
        return None
    return Path(root) / f"global_step_{record.last_global_step}"


def cautious(key: str) -> Any:
    """Return the value that a switch has before one is chosen."""
    return next(value for name, value in CAUTIOUS.items() if key.endswith(name))


def chosen_again(config: C, keys: Iterable[str], planner: Planner[C]) -> C:
    """Return a changed config, in which the switches with these keys have the best values that now fit."""
    switches = {key: cautious(key) for key in keys}
    return choose(with_options(config, switches), switches, planner, {}).config


def _recorded_value(recorded: Mapping[str, Any], key: str) -> Any:
    """Return the value of an option in a checkpoint; sections that the user named are recorded as one."""
    if key in recorded:
        return recorded[key]
    for name, section in recorded.items():
        if isinstance(section, dict) and key.startswith(f"{name}."):
            return _recorded_value(section, key.removeprefix(f"{name}."))
    return AUTO


def is_no_worse(plan: MemoryPlan, first: MemoryPlan) -> bool:
    """Return whether all phases fit, or are no larger than in a first plan in which they do not."""
    taken = {phase.name: (phase.device_bytes, first.node_bytes(phase)) for phase in first.misfits()}
    return all(
        phase.name in taken
        and phase.device_bytes <= taken[phase.name][0]
        and plan.node_bytes(phase) <= taken[phase.name][1]
        for phase in plan.misfits()
    )


def _candidates(run: PlannedRun, key: str, machine: Machine) -> tuple[str, list[Any]]:
    """Return why a switch has to be cautious, if it has to, and its other values, the best first."""
    if not BACKENDS[machine.device].is_gpu:
        return f"on {machine.device}", []
    section, _, name = key.rpartition(".")
    if not section.endswith(".model"):
        return "", [False]
    planned = next(each for each in run.planned_models if each.option == section)
    model = planned.model
    if model.is_pipeline:
        return "a diffusion model", []
    if name != COMPILE.rpartition(".")[2]:
        return "", list(shares_of(model))
    replays = "routes are replayed" if planned.router_replay != "off" else ""
    divided = "ranks share layers" if planned.fsdp.tensor_parallel_size > 1 else ""
    reason = machine.no_compiler or replays or divided or uncompiled(model, machine.device)
    return (reason, []) if reason else ("", [True])


def shares_of(model: ModelConfig) -> tuple[Any, ...]:
    """Return the shares of recomputed blocks, but for all of them, that a model may have: tested ones."""
    return SHARES if type_of(model) in TESTED else SHARES[:1]


def type_of(model: ModelConfig) -> str:
    """Return the type of the language model by its config; "unknown" without one that is built in."""
    folder = local_folder(model.model_path) if model.family is None else None
    found = (read_json(folder / CONFIG) if folder else None) or {}
    text = next((found[name] for name in TEXT_CONFIGS if isinstance(found.get(name), dict)), found)
    kind = str(text.get("model_type") or found.get("model_type", "unknown"))
    return kind if kind in TESTED else kind.removesuffix("_text")


def uncompiled(model: ModelConfig, device: str) -> str:
    """Say why blocks of a model are not compiled by `auto`; empty if nothing is known against it."""
    if not BACKENDS[device].has_kernels:
        return f"not tested on {device}"
    if model.lora.use_dora or model.lora.target_parameters:
        return "only plain adapters of linear layers are tested in compiled blocks"
    kind = type_of(model)
    return "" if kind in TESTED else f"blocks of {kind} are not tested compiled"
