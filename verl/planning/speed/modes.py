# SPDX-License-Identifier: Apache-2.0
"""Tokens per second in each mode of `trainer.async`, with the GPUs of a run divided in different ways."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from verl.config.ppo import PPOConfig
from verl.config.trainer import TrainerConfig
from verl.distributed.backends import USUAL_GPU
from verl.planning.memory_plan import held_model
from verl.planning.planned_run import PlannedEngine, with_options
from verl.planning.report import Changes, problems_of
from verl.planning.speed.cluster import Cluster
from verl.planning.speed.rollout_time import EngineSpeed
from verl.planning.speed.simulation import ORDERS, Costs, SimulatedRun, SimulatedWork, simulate
from verl.planning.speed.step_time import Predictor
from verl.planning.speed.workload import Responses

C = TypeVar("C", bound=PPOConfig)

MODE = "trainer.async_training.mode"
STALENESS = "trainer.async_training.staleness_threshold"
IN_FLIGHT = "trainer.async_training.max_inflight_prompts"
FOR_ROLLOUT = "trainer.n_gpus_for_rollout"
SAMPLING_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # of the GPUs, where some only sample
THRESHOLD = 4  # updates, unless the config has a larger one
STEPS, WARM_UP = 8, 2 * THRESHOLD  # that are simulated
LIMITS = (0.5, 0.25, 0.125)  # of the prompts that an engine samples at once by default
MIN_GAIN = 1.03  # by such a limit, to be worth an option
ENGINES = 4  # at most; more are simulated by as many, with their share of the prompts


@dataclass(frozen=True)
class ModeTime:
    """A mode, the options that differ from the config's, and its simulated run."""

    mode: str
    changes: Changes
    run: SimulatedRun
    rate: float  # tokens of responses per second, of all engines


def compare_modes(config: PPOConfig, predict: Predictor[PPOConfig]) -> list[ModeTime]:
    """Simulate the config as it is, first, and the best division of its GPUs in each other mode that fits.

    Its own mode is there again if it is faster with fewer prompts at once.
    """
    now = ModeTime(config.trainer.async_training.mode, {}, *_simulated(config, predict))
    best = {now.mode: (now, predict)}
    allowed = problems_of(config)
    for changes, cluster in _candidates(config.trainer, predict.cluster):
        mode, changed = str(changes[MODE]), with_options(config, changes)
        if mode == now.mode or not problems_of(changed) <= allowed or predict.plan(changed).misfits():
            continue
        its_predict = replace(predict, cluster=cluster)
        found = ModeTime(mode, changes, *_simulated(changed, its_predict))
        if mode not in best or best[mode][0].rate < found.rate:
            best[mode] = found, its_predict
    others = [_limited(config, *each) for each in best.values()]
    return [now, *sorted((each for each in others if each is not now), key=lambda each: -each.rate)]


def _limited(config: C, time: ModeTime, predict: Predictor[C]) -> ModeTime:
    """Return a mode with fewer prompts at once in an engine if that is faster: long responses end sooner."""
    changed = with_options(config, time.changes)
    training, rollout = changed.trainer.async_training, changed.worker.rollout
    if not training.continues_responses:
        return time
    share = changed.data.rollout_batch_size * (training.staleness_threshold + 1) / changed.num_engines
    most = training.max_inflight_prompts or min(share, rollout.sequences_at_once(on_gpu=True) / rollout.n)
    found = [time]
    for limit in sorted({max(1, round(part * most)) for part in LIMITS}):
        changes = time.changes | {IN_FLIGHT: limit}
        found.append(ModeTime(time.mode, changes, *_simulated(with_options(config, changes), predict)))
    fastest = max(found, key=lambda each: each.rate)
    return fastest if fastest.rate > MIN_GAIN * time.rate else time


def _candidates(trainer: TrainerConfig, cluster: Cluster) -> Iterator[tuple[Changes, Cluster]]:
    """Yield options of each mode and the cluster that trains, with the same number of GPUs in all."""
    total = cluster.world_size + trainer.n_gpus_for_rollout
    threshold = {STALENESS: max(THRESHOLD, trainer.async_training.staleness_threshold)}
    for mode, order in ORDERS.items():
        bound = threshold if order.staleness is None else {}
        shares = (0.0,) if order.in_turn else SAMPLING_SHARES
        for sampling in sorted({round(share * total) for share in shares}):
            training = _cluster_of(total - sampling, cluster)
            if training is not None and (sampling > 0 or order.in_turn):
                devices = {"trainer.nnodes": training.nodes, "trainer.n_gpus_per_node": training.gpus}
                where = {"worker.hybrid_engine": order.in_turn, FOR_ROLLOUT: sampling}
                yield {MODE: mode} | bound | where | devices, training


def _cluster_of(gpus: int, like: Cluster) -> Cluster | None:
    """Return a cluster with `gpus` GPUs; None if they are not whole nodes."""
    if gpus % like.gpus == 0:
        return replace(like, nodes=gpus // like.gpus) if gpus else None
    return replace(like, gpus=gpus) if 0 < gpus < like.gpus else None


def _simulated(config: C, predict: Predictor[C]) -> tuple[SimulatedRun, float]:
    """Simulate a run whose micro batch sizes are numbers; returns it and the rate of all engines."""
    training = config.trainer.async_training
    engine = predict.plan.describe(config).engine
    assert engine is not None, "a reinforcement learning run samples"
    lengths = predict.lengths(config)
    number = min(config.num_engines, ENGINES)
    share = number / config.num_engines
    work = SimulatedWork(
        max(1, round(config.data.rollout_batch_size * share)),
        config.worker.rollout.n,
        lengths.prompt,
        drawn_lengths(lengths.responses).__next__,
        STEPS,
    )
    run = simulate(
        training.mode,
        work,
        predicted_costs(config, predict, engine),
        engines=number,
        staleness=training.staleness_threshold,
        max_in_flight=training.max_inflight_prompts,
        at_once=config.worker.rollout.sequences_at_once(on_gpu=True),
        warm_up=WARM_UP,
    )
    return run, run.rate / share


def predicted_costs(config: C, predict: Predictor[C], engine: PlannedEngine) -> Costs:
    """Predict what a simulation needs from the phases of a step."""
    step, run = predict(config), predict.plan.describe(config)
    cluster, lengths = predict.cluster, predict.lengths(config)
    policy = held_model(run.models[0], cluster.world_size, USUAL_GPU, predict.plan.read_shape).shape
    speed = EngineSpeed(engine, policy, cluster, has_adapters=run.serves_adapters(USUAL_GPU))
    context = lengths.prompt + lengths.responses.mean_square / 2 / lengths.responses.mean

    @cache
    def decoding(running: int) -> float:
        return sum(speed.step_seconds(running, context).values())

    sync = step.phase("sync_weights").seconds
    total = sum(phase.seconds for phase in step.phases) - step.phase("gen").seconds
    return Costs(
        decoding,
        speed.call_seconds(lengths)["prompts"] / max(1.0, engine.prompts * lengths.prompt),
        total - sync if config.worker.hybrid_engine else total,  # else it sends the weights
        sync,
        speed.sequences_at_once(lengths),
    )


def drawn_lengths(responses: Responses) -> Iterator[float]:
    """Yield lengths of random responses, always the same ones."""
    rng, rate = random.Random(0), 1 / responses.scale
    while True:
        yield max(1.0, min(responses.maximum, rng.expovariate(rate)))
