# SPDX-License-Identifier: Apache-2.0
"""The predicted step of `--dry-run` as text: its phases, options that would shorten it, other modes.

Each option is tried by predicting time and memory again; an option that changes the loss is not tried.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.config.ppo import PPOConfig
from verl.config.schema import value_at
from verl.config.trainer import RunTree
from verl.planning.auto_switches import (
    COMPILE,
    RECOMPUTE,
    Choice,
    cautious,
    chosen_again,
    is_no_worse,
    shares_of,
    uncompiled,
)
from verl.planning.memory_plan import expert_sizes
from verl.planning.planned_run import with_options
from verl.planning.report import Changes, problems_of, text_of
from verl.planning.speed.modes import ModeTime, compare_modes
from verl.planning.speed.step_time import PhaseTime, Predictor, StepTime
from verl.planning.step_plan import PlanLine
from verl.utils.text_table import table

C = TypeVar("C", bound=RunTree)

SHOWN_PARTS = 3
SHOWN_ADVICE = 3
SHOWN_RATE = 10  # smaller ones have decimals
KERNEL = "worker.actor.attention_kernel"
MIN_SHARE = 0.005  # of the step; shorter parts are left out
MIN_GAIN = 0.01  # of the step; smaller gains are left out
ENGINE_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9)


@dataclass(frozen=True)
class Advice:
    """A change of options and the step that it would give."""

    changes: Changes
    seconds: float


def time_text(config: C, predict: Predictor[C], choices: Mapping[str, Choice]) -> str:
    """Format the predicted step of a run whose micro batch sizes are numbers, and what would shorten it."""
    step, cluster = predict(config), predict.cluster
    lines = [PlanLine("s", "step", "share"), *(_line(phase, step) for phase in step.phases)]
    rate = step.tokens / step.seconds / step.gpus
    digits = 0 if rate > SHOWN_RATE else 3
    mfu = ", ".join(f"MFU of {name} {100 * value:.0f} %" for name, value in step.mfu.items())
    lines.append(
        PlanLine("step", f"{step.seconds:.1f}", "", f"{rate:.{digits}f} {step.unit} a second and GPU, {mfu}")
    )
    return (
        f"  {cluster.name}; assumed: {predict.assumed(config)}\n"
        + table(lines, has_remarks=True)
        + "  not included: validation, waiting for rewards; an estimate, see docs/predicted_step.md\n"
        + "".join(_advice(advice, step) for advice in advise(config, predict, choices)[:SHOWN_ADVICE])
        + _modes_text(config, predict)
        + _saved_text(config, predict, choices)
    )


def _saved_text(config: Any, predict: Predictor[Any], choices: Mapping[str, Choice]) -> str:
    """Format what each choice of `auto` saves of the step, against the cautious value."""
    now, lines = predict(config).seconds, []
    for key, choice in choices.items():
        if choice.value != cautious(key):
            saved = predict(with_options(config, {key: cautious(key)})).seconds - now
            lines.append(f"  auto: {text_of({key: choice.value})} saves {saved:.1f} s\n")
    return "".join(lines)


def _modes_text(config: Any, predict: Predictor[Any]) -> str:
    """Format what other modes of sampling would change; empty for a run that does not train on samples."""
    if not isinstance(config, PPOConfig) or config.trainer.val_only or config.trainer.diffusion:
        return ""
    now, *others = compare_modes(config, predict)
    if not others:
        return ""
    rates = [
        f"    {other.rate / now.rate:.2f} x: {text_of(other.changes)}{_idle(other)}\n" for other in others
    ]
    return (
        f"  simulated with mode={now.mode}: {now.rate:.0f} response tokens a second{_idle(now)}; others:\n"
        + "".join(rates)
    )


def _idle(time: ModeTime) -> str:
    sampling, training = 100 * time.run.idle_sampling, 100 * time.run.idle_training
    return f" (engines idle {sampling:.0f} %, training {training:.0f} %)"


def _advice(advice: Advice, step: StepTime) -> str:
    change = 100 * advice.seconds / step.seconds - 100
    needs = " (needs FlashAttention 3)" if KERNEL in advice.changes else ""
    return f"  shorter: {text_of(advice.changes)}{needs}: {advice.seconds:.1f} s, {change:.0f} %\n"


def _line(phase: PhaseTime, step: StepTime) -> PlanLine:
    parts = sorted(phase.parts.items(), key=lambda part: -part[1])[:SHOWN_PARTS]
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts if value >= MIN_SHARE * step.seconds)
    share = f"{100 * phase.seconds / step.seconds:.0f} %"
    return PlanLine(phase.name, f"{phase.seconds:.1f}", share, shown)


def advise(config: C, predict: Predictor[C], chosen: Collection[str] = ()) -> list[Advice]:
    """Return changes that shorten the step and fit into memory: the best of each option, the best first.

    Switches that are `auto`, those in `chosen`, are chosen again for each change.
    """
    now = predict(config).seconds
    best: dict[tuple[str, ...], Advice] = {}
    # A change may leave phases that do not fit and problems as they are, but must not add to them.
    plan = predict.plan(config)
    problems = problems_of(config)
    for changes in _candidates(config, predict):
        changed = with_options(config, changes)
        # Another machine may have the package that a kernel needs.
        if any(KERNEL not in problem for problem in problems_of(changed) - problems):
            continue
        changed = chosen_again(changed, [key for key in chosen if key not in changes], predict.plan)
        advice, name = Advice(changes, predict(changed).seconds), tuple(changes)
        is_best = name not in best or advice.seconds < best[name].seconds
        shortens = advice.seconds < (1 - MIN_GAIN) * now
        if shortens and is_best and is_no_worse(predict.plan(changed), plan):
            best[name] = advice
    return sorted(best.values(), key=lambda advice: advice.seconds)


def _candidates(config: Any, predict: Predictor[Any]) -> Iterator[Changes]:
    run, cluster = predict.plan.describe(config), predict.cluster
    for option in dict.fromkeys(each.size_option for each in run.passes):
        now = value_at(config, option)
        yield from ({option: size} for size in run.sizes(option) if size != now)
    if not uncompiled(config.worker.actor.model, cluster.machine.device):
        yield {f"worker.actor.{COMPILE}": True}
    yield {KERNEL: "flash"}
    for role in run.roles():
        section = f"worker.{role}"
        yield {f"{section}.offload.offload_params": False}
        yield {f"{section}.fsdp.enable_cpu_offload": False}
    for section, model in {each.section: each.model for each in run.planned_models if each.optim}.items():
        yield {f"{section}.offload.offload_optimizer": False}
        yield {f"{section}.offload.offload_params": False, f"{section}.offload.offload_optimizer": False}
        for share in shares_of(model):
            yield {f"{section}.{RECOMPUTE}": share}
        yield {f"{section}.fsdp.enable_full_shard": False}
        yield {f"{section}.dynamic_batching": True}
        if cluster.nodes > 1:
            yield {f"{section}.fsdp.fsdp_size": cluster.gpus}
    yield from expert_sizes(run, predict.plan.read_shape)
    for ranks in (1, 2, 4, 8, 16):
        yield {"worker.actor.ulysses_size": ranks}
        yield {"worker.actor.ring_size": ranks}
    if config.trainer.save_freq > 0:
        yield {"trainer.async_save": True}
    if isinstance(config, PPOConfig):
        yield {"worker.actor.share_prompt": True}
        yield {"worker.rollout.enforce_eager": False}
        yield from ({"worker.rollout.tensor_parallel_size": ranks} for ranks in (1, 2, 4, 8, 16))
        yield from ({"worker.rollout.gpu_memory_utilization": share} for share in ENGINE_SHARES)
