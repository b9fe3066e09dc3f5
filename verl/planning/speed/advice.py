# SPDX-License-Identifier: Apache-2.0
"""Advice for a shorter step: each option is tried by predicting time and memory again.

Only options that leave the loss as it is are tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, check_config, value_at
from verl.config.trainer import RunTree
from verl.planning.memory_plan import Planner, expert_sizes
from verl.planning.report import Changes, with_options
from verl.planning.speed.step_time import Predictor

C = TypeVar("C", bound=RunTree)

MIN_GAIN = 0.01  # of the step; smaller gains are left out
ENGINE_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9)


@dataclass(frozen=True)
class Advice:
    """A change of options and the step that it would give."""

    changes: Changes
    seconds: float


def advise(config: C, predict: Predictor[C], plan: Planner[C]) -> list[Advice]:
    """Return changes that shorten the step and fit into memory: the best of each option, the best first."""
    now = predict(config).seconds
    best: dict[tuple[str, ...], Advice] = {}
    # A change may leave phases that do not fit and problems as they are, but must not add to them.
    unfit = {phase.name for phase in plan(config).misfits()}
    problems = problems_of(config)
    for changes in _candidates(config, predict):
        changed = with_options(config, changes)
        if not problems_of(changed) <= problems:
            continue
        advice, name = Advice(changes, predict(changed).seconds), tuple(changes)
        is_best = name not in best or advice.seconds < best[name].seconds
        shortens = advice.seconds < (1 - MIN_GAIN) * now
        if shortens and is_best and {phase.name for phase in plan(changed).misfits()} <= unfit:
            best[name] = advice
    return sorted(best.values(), key=lambda advice: advice.seconds)


def problems_of(config: RunTree) -> set[str]:
    """Return the rules that a config breaks."""
    try:
        check_config(config)
    except ConfigError as error:
        return set(error.problems)
    return set()


def _candidates(config: Any, predict: Predictor[Any]) -> Iterator[Changes]:
    run, cluster = predict.describe(config), predict.cluster
    for option in dict.fromkeys(each.size_option for each in run.passes):
        now = value_at(config, option)
        yield from ({option: size} for size in run.sizes(option) if size > now)
    for role in run.roles():
        section = f"worker.{role}"
        yield {f"{section}.offload.offload_params": False}
        yield {f"{section}.fsdp.enable_cpu_offload": False}
    for role in run.roles(trained_only=True):
        section = f"worker.{role}"
        yield {f"{section}.offload.offload_optimizer": False}
        yield {f"{section}.offload.offload_params": False, f"{section}.offload.offload_optimizer": False}
        yield {f"{section}.model.enable_gradient_checkpointing": False}
        yield {f"{section}.fsdp.enable_full_shard": False}
        yield {f"{section}.dynamic_batching": True}
        if cluster.nodes > 1:
            yield {f"{section}.fsdp.fsdp_size": cluster.gpus}
    yield from expert_sizes(run, predict.read_shape)
    for ranks in (1, 2, 4, 8, 16):
        yield {"worker.actor.ulysses_size": ranks}
        yield {"worker.actor.ring_size": ranks}
    if config.trainer.save_freq > 0:
        yield {"trainer.async_save": True}
    if isinstance(config, PPOConfig):
        yield from _rollout_candidates()


def _rollout_candidates() -> Iterator[Changes]:
    yield {"worker.actor.share_prompt": True}
    yield {"worker.rollout.enforce_eager": False}
    yield from ({"worker.rollout.tensor_parallel_size": ranks} for ranks in (1, 2, 4, 8, 16))
    yield from ({"worker.rollout.gpu_memory_utilization": share} for share in ENGINE_SHARES)
