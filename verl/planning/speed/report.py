# SPDX-License-Identifier: Apache-2.0
"""The predicted step of `--dry-run` as text: its phases, options that would shorten it, other modes."""

from typing import Any, TypeVar

from verl.config.ppo import PPOConfig
from verl.config.trainer import RunTree
from verl.planning.memory_plan import Planner
from verl.planning.report import text_of
from verl.planning.speed.advice import Advice, advise
from verl.planning.speed.modes import ModeTime, compare_modes
from verl.planning.speed.step_time import PhaseTime, Predictor, StepTime
from verl.planning.step_plan import PlanLine
from verl.utils.text_table import table

C = TypeVar("C", bound=RunTree)

SHOWN_PARTS = 3
SHOWN_ADVICE = 3
SHOWN_RATE = 10  # smaller ones have decimals
MIN_SHARE = 0.005  # of the step; shorter parts are left out


def time_text(config: C, predict: Predictor[C], plan: Planner[C]) -> str:
    """Format the predicted step of a run whose micro batch sizes are numbers."""
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
        + "".join(_advice(advice, step) for advice in advise(config, predict, plan)[:SHOWN_ADVICE])
        + _modes_text(config, predict, plan)
    )


def _modes_text(config: Any, predict: Predictor[Any], plan: Planner[Any]) -> str:
    """Format what other modes of sampling would change; empty for a run that does not train on samples."""
    if not isinstance(config, PPOConfig) or config.trainer.val_only or config.trainer.diffusion:
        return ""
    now, *others = compare_modes(config, predict, plan)
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
    return (
        f" (engines idle {100 * time.run.idle_sampling:.0f} %, training {100 * time.run.idle_training:.0f} %)"
    )


def _advice(advice: Advice, step: StepTime) -> str:
    change = 100 * advice.seconds / step.seconds - 100
    return f"  shorter: {text_of(advice.changes)}: {advice.seconds:.1f} s, {change:.0f} %\n"


def _line(phase: PhaseTime, step: StepTime) -> PlanLine:
    parts = sorted(phase.parts.items(), key=lambda part: -part[1])[:SHOWN_PARTS]
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts if value >= MIN_SHARE * step.seconds)
    share = f"{100 * phase.seconds / step.seconds:.0f} %"
    return PlanLine(phase.name, f"{phase.seconds:.1f}", share, shown)
