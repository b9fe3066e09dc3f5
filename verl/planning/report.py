# SPDX-License-Identifier: Apache-2.0
"""Memory report of `--dry-run`, options that make a run fit, and the values of `auto`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from verl.config.files.model_files import local_folder
from verl.config.files.paths import MODEL_CONFIGS
from verl.config.schema import ConfigError, check_config, value_at
from verl.config.trainer import RunTree
from verl.distributed.backends import on_gpu
from verl.planning.auto_switches import Choice, Chosen, choose, open_switches
from verl.planning.machine import GIB, Machine, MemoryPlan, Phase, UnknownMemoryError, find_machine
from verl.planning.memory_plan import REWARD, Planner, expert_sizes, read_pictures, shape_of
from verl.planning.planned_run import PlannedRun, with_options
from verl.planning.step_plan import PlanLine
from verl.planning.stored_shape import stored_shape
from verl.utils.imports import deferred
from verl.utils.rank_logger import get_logger
from verl.utils.text_table import table

logger = get_logger(__name__)

C = TypeVar("C", bound=RunTree)
Describe = Callable[[C], PlannedRun]  # `planned_ppo` or `planned_sft`
Changes = dict[str, Any]  # options by their keys

read_shape = deferred("verl.planning.model_sizes", "read_shape")  # imports torch
check_model = deferred("verl.planning.model_sizes", "check_model")  # too
ENGINE_SHARE = "worker.rollout.gpu_memory_utilization"
ENGINE_RANKS = "worker.rollout.tensor_parallel_size"
MIN_SHOWN = GIB // 20  # smaller parts of a phase are left out of its line


def resolve_auto(
    config: C,
    describe: Describe[C],
    device: str,
    find: Callable[[str], Machine] = find_machine,
    recorded: Callable[[], Mapping[str, Any]] = dict,
) -> C:
    """Replace `auto` by what fits the machine that `find` returns: micro batch sizes, then switches.

    `recorded` returns the options of the checkpoint that the run resumes from, whose choices it repeats.

    Raises:
        ValueError: A size is `auto`, and not even one sequence fits, for which the error names the options
            that would help; or no GPU reports its memory.
    """
    run = describe(config)
    sizes, switches = run.auto_options(), open_switches(type(config), run)
    if not on_gpu(device):
        config, switches = with_options(config, switches), {}
    if not sizes and not switches:
        return config
    try:
        machine = find(device)
    except UnknownMemoryError:
        if sizes:
            raise UnknownMemoryError(
                f"`{sizes[0]}` (auto) must be a number where no {device} reports its memory: set"
                f" {text_of(dict.fromkeys(sizes, 1))} or more"
            ) from None
        logger.info("no %s reports its memory, so nothing is chosen for it: %s", device, text_of(switches))
        return with_options(config, switches)
    before = recorded() if switches else {}
    planner = make_planner(describe, machine)
    chosen = _resolved(config, planner, before)
    for key in sizes:
        size = value_at(chosen.config, key)
        logger.info("micro batch size that fits: %s=%d memory=%r", key, size, machine.name)
    for key, choice in chosen.choices.items():
        logger.info("chosen for the device: %s=%s memory=%r", key, choice, machine.name)
    for text in _misfit_texts(chosen.config, planner):
        logger.warning("by its plan the run does not fit: %s", text)
    return chosen.config


def _resolved(config: C, planner: Planner[C], recorded: Mapping[str, Any]) -> Chosen[C]:
    switches = open_switches(type(config), planner.describe(config))
    sized = with_largest_sizes(with_options(config, switches), planner)
    return choose(sized, switches, planner, recorded)


def make_planner(describe: Describe[C], machine: Machine) -> Planner[C]:
    """Build a planner that reads the config of each model once."""
    shapes = {}

    def read(model, fsdp, *, option, **options):  # noqa: ANN001, ANN003, ANN202 - as `read_shape`
        key = repr((model, fsdp.torch_dtype, options))
        if key not in shapes:
            shapes[key] = stored_shape(model, fsdp, **options)
        known = shapes[key]
        if known is None or not known.divides_into(fsdp.expert_parallel_size):  # then it says why not
            shapes[key] = read_shape(model, fsdp, option=option, **options)
        return shapes[key]

    pictures = {}

    def pictures_of(*options):  # noqa: ANN002, ANN202 - as `read_pictures`
        key = repr(options)
        if key not in pictures:
            pictures[key] = read_pictures(*options)
        return pictures[key]

    return Planner(describe, read, machine, pictures_of)


@dataclass(frozen=True)
class DryRun(Generic[C]):
    """A run with numbers instead of `auto`, and its memory report."""

    config: C
    memory: str
    planner: Planner[C] | None = None  # None where a model or the machine is unknown
    problem: str | None = None  # that would end the run
    choices: Mapping[str, Choice] = field(default_factory=dict)  # of switches that were `auto`


def dry_run_memory(
    config: C,
    describe: Describe[C],
    memory_gb: float | None = None,
    machine: Machine | None = None,
    recorded: Callable[[], Mapping[str, Any]] = dict,
) -> DryRun[C]:
    """Plan the memory of a run on a machine, or on this one; `recorded` as for `resolve_auto`.

    Where the sizes of a model cannot be read, the config is unchanged and the report or `problem` says so.
    """
    run = describe(config)
    for option, path in _missing_configs(run):
        text = (
            f"  not planned: `{option}` ({path}) has no config on this machine to read sizes from:\n"
            f"  hf download {path} --include '*.json'\n"
        )
        return DryRun(config, text)
    try:
        for planned in run.models:
            if planned.has_rules_of_layers:
                check_model(planned, run.lengths.ranks // run.ring)
        plan = make_planner(describe, machine or find_machine(config.trainer.device, memory_gb))
        chosen = _resolved(config, plan, recorded())
    except (ValueError, FileNotFoundError) as error:
        return DryRun(config, "", problem=str(error))
    resolved = chosen.config
    lines = [f"  auto: {key}={value_at(resolved, key)}\n" for key in run.auto_options()]
    lines += [f"  auto: {key}={choice}\n" for key, choice in chosen.choices.items()]
    return DryRun(resolved, memory_text(resolved, plan) + "".join(lines), plan, choices=chosen.choices)


def memory_text(config: C, planner: Planner[C]) -> str:
    """Format a plan: a table with one line for each phase, then the phases that do not fit."""
    plan, machine = planner(config), planner.machine
    is_cpu = machine.device == "cpu"
    available = "-" if is_cpu else _gib(machine.device_bytes)
    lines = [
        PlanLine("GiB", "a process" if is_cpu else "a GPU", "a node"),
        *(_phase_line(phase, plan) for phase in plan.phases),
        PlanLine("available", available, _gib(machine.host_bytes), f"{machine.name}; a tenth is kept free"),
    ]
    return (
        "".join(f"  {line}\n" for line in plan.models)
        + table(lines, has_remarks=True)
        + "".join(f"  does not fit: {text}\n" for text in _misfit_texts(config, planner))
    )


def _misfit_texts(config: C, planner: Planner[C]) -> list[str]:
    plan = planner(config)
    return [misfit_text(config, phase, plan, planner) for phase in plan.misfits()]


def _phase_line(phase: Phase, plan: MemoryPlan) -> PlanLine:
    held = (phase.device, phase.host, phase.first_rank)
    parts = sorted((part for parts in held for part in parts.items()), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size >= MIN_SHOWN)
    device = phase.device_bytes
    if plan.machine.device == "cpu":
        device += sum(phase.host.values())
    return PlanLine(phase.name, _gib(device), _gib(plan.node_bytes(phase)), shown)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _missing_configs(run: PlannedRun) -> Iterator[tuple[str, str]]:
    """Yield the option and path of models whose config is neither in a folder nor in the hub's cache."""
    named = [(f"{model.option}.model_path", model.model.model_path) for model in run.planned_models]
    named += [(f"{server.option}.model_path", server.options.model_path) for server in run.servers]
    for option, path in named:
        folder = local_folder(path)
        has_config = folder is not None and any((folder / name).is_file() for name in MODEL_CONFIGS)
        if path is not None and not has_config:
            yield option, path


def problems_of(config: RunTree) -> set[str]:
    """Return the rules that a config breaks."""
    try:
        check_config(config)
    except ConfigError as error:
        return set(error.problems)
    return set()


def with_largest_sizes(config: C, planner: Planner[C]) -> C:
    """Replace each micro batch size that is `auto` by the largest whose phases fit.

    Sizes divide the sequences of a rank, so that all micro batches are equally large.

    Raises:
        ValueError: Not even one sequence fits; names the options that would help.
    """
    run = planner.describe(config)
    options = run.auto_options()
    config = with_options(config, dict.fromkeys(options, 1))
    smallest = planner(config)
    for phase in smallest.misfits():
        if phase.size_option in options:
            reason = misfit_text(config, phase, smallest, planner)
            raise ValueError(f"`{phase.size_option}` (auto): not even one sequence fits: {reason}")
    for key in options:
        candidates = (with_options(config, {key: size}) for size in run.sizes(key))
        config = next(candidate for candidate in candidates if _fits(candidate, planner, size_option=key))
    return config


def misfit_text(config: C, phase: Phase, plan: MemoryPlan, planner: Planner[C]) -> str:
    """Say what a phase takes, what is usable, and which options with which values make it fit."""
    machine = plan.machine
    if not phase.engine_fits:
        return _engine_text(config, phase, planner)
    if on_gpu(machine.device) and phase.device_bytes > machine.usable_device:
        taken, usable, place = phase.device_bytes, machine.usable_device, "a GPU"
    else:
        taken, usable, place = plan.node_bytes(phase), machine.usable_host, "the host memory of a node"
    changes = remedy(config, phase, planner)
    advice = (
        f"set {text_of(changes)}" if changes else "use more devices (`trainer.nnodes`) or a smaller model"
    )
    return f"{phase.name} takes {_gib(taken)} GiB of {place}, {_gib(usable)} are usable: {advice}"


def _engine_text(config: Any, phase: Phase, planner: Planner[Any]) -> str:
    """Say that an engine does not fit into its share of a GPU, and which options with which values help."""
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in phase.engine.items())
    changes, total = remedy(config, phase, planner), sum(phase.engine.values())
    advice = f"set {text_of(changes)}" if changes else "use GPUs with more memory or a smaller model"
    return (
        f"{phase.name}: the rollout engine needs {_gib(total)} GiB of a GPU ({parts}), `{ENGINE_SHARE}`"
        f" ({value_at(config, ENGINE_SHARE):g}) gives it {_gib(phase.engine_share)}: {advice}"
    )


def text_of(changes: Changes) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())


def remedy(config: C, phase: Phase, planner: Planner[C]) -> Changes:
    """Find the least intrusive change that makes a phase fit: one option if one does, else several."""
    remedies = (_news(config, changes) for changes in _remedies(config, planner, phase))
    candidates = [changes for changes in remedies if changes]
    for changes in candidates:
        if _fits(with_options(config, changes), planner, name=phase.name):
            return changes
    combined: Changes = {}
    for changes in candidates:
        combined |= changes
        if _fits(with_options(config, combined), planner, name=phase.name):
            return combined
    return {}


def _news(config: Any, changes: Changes) -> Changes:
    """Return the options that do not have their values yet."""
    return {key: value for key, value in changes.items() if with_options(config, {key: value}) != config}


def _remedies(config: Any, planner: Planner[Any], phase: Phase) -> Iterator[Changes]:
    """Yield options that lower a phase, the least intrusive first; `docs/memory.md` lists them."""
    run = planner.describe(config)
    if phase.size_option is not None:
        now = value_at(config, phase.size_option)
        yield from ({phase.size_option: size} for size in run.sizes(phase.size_option) if size < now)
    if phase.updated_role is not None:
        yield {f"worker.{phase.updated_role}.model.enable_gradient_checkpointing": True}
    if phase.size_option is not None:  # further ranks save little and are behind slower links
        yield from expert_sizes(run, planner.read_shape, at_most=run.trainer.n_gpus_per_node)
    if not phase.engine_fits:
        yield from _engine_remedies(config, planner)
    elif phase.name == "gen":
        yield from _lower_shares(ENGINE_SHARE, value_at(config, ENGINE_SHARE))
    if phase.name == REWARD:
        for server in run.servers:
            share = f"{server.option}.gpu_memory_utilization"
            yield from _lower_shares(share, server.options.gpu_memory_utilization)
    yield from _offloads(run)
    if phase.updated_role is not None:
        section = f"worker.{phase.updated_role}"
        yield {f"{section}.fsdp.torch_dtype": "bf16", f"{section}.optim.strategy": "adamw_bf16"}
    if run.trainer.async_save:
        yield {"trainer.async_save": False}


def _engine_remedies(config: Any, planner: Planner[Any]) -> Iterator[Changes]:
    """Yield larger shares of a GPU for the rollout engine, engines of more GPUs, and both with offloading."""
    run, now, ranks = planner.describe(config), value_at(config, ENGINE_SHARE), value_at(config, ENGINE_RANKS)
    larger = [{ENGINE_SHARE: share} for step in range(1, 19) if (share := round(0.05 * step, 2)) > now]
    changes = list(larger)
    heads, problems = shape_of(run.models[0], planner.read_shape).text.heads, problems_of(config)
    for size in range(ranks + 1, run.trainer.n_gpus_per_node + 1):
        divided = {ENGINE_RANKS: size}
        if heads % size == 0 and problems_of(with_options(config, divided)) <= problems:
            changes += [divided | share for share in ({}, *larger)]
    optimizers, weights = _offloads(run)
    for offloaded in ({}, optimizers, optimizers | weights):
        yield from (change | offloaded for change in changes)


def _offloads(run: PlannedRun) -> tuple[Changes, Changes]:
    """Return the options that keep all optimizers in host memory, and all weights."""
    optimizers = {f"worker.{role}.offload.offload_optimizer": True for role in run.roles(trained_only=True)}
    return optimizers, {f"worker.{role}.offload.offload_params": True for role in run.roles()}


def _lower_shares(option: str, now: float) -> Iterator[Changes]:
    """Yield smaller shares of a GPU's memory for an engine, the largest first."""
    shares = (round(0.05 * step, 2) for step in range(int(now / 0.05), 3, -1))
    yield from ({option: share} for share in shares if share < now)


def _fits(config: C, planner: Planner[C], **phase_fields: str) -> bool:
    """Return whether all phases with these values of their fields fit."""
    misfits = planner(config).misfits()
    return not any(vars(phase).items() >= phase_fields.items() for phase in misfits)
