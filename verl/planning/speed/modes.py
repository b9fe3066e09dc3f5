# SPDX-License-Identifier: Apache-2.0
"""Tokens per second in each mode of `trainer.async`, with the GPUs of a run divided in different ways."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from verl.config.ppo import PPOConfig
from verl.config.trainer import TrainerConfig
from verl.planning.memory_plan import Planner, held_model
from verl.planning.planned_run import PlannedEngine
from verl.planning.report import Changes, with_options
from verl.planning.speed.advice import problems_of
from verl.planning.speed.cluster import Cluster
from verl.planning.speed.sampling import decoding_step, sampling_time
from verl.planning.speed.simulation import ORDERS, Costs, SimulatedRun, SimulatedWork, simulate
from verl.planning.speed.step_time import Predictor
from verl.planning.speed.workload import Responses

C = TypeVar("C", bound=PPOConfig)

MODE = "trainer.async_training.mode"
STALENESS = "trainer.async_training.staleness_threshold"
FOR_ROLLOUT = "trainer.n_gpus_for_rollout"
SAMPLING_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # of the GPUs, where some only sample
THRESHOLD = 4  # updates, unless the config has a larger one
STEPS, WARM_UP = 8, THRESHOLD  # that are simulated
ENGINES = 4  # at most; more are simulated by as many, with their share of the prompts


@dataclass(frozen=True)
class ModeTime:
    """A mode, the options that differ from the config's, and its simulated run."""

    mode: str
    changes: Changes
    run: SimulatedRun
    rate: float  # tokens of responses per second, of all engines


def compare_modes(
    config: PPOConfig, predict: Predictor[PPOConfig], plan: Planner[PPOConfig]
) -> list[ModeTime]:
    """Simulate the config as it is, first, and the best division of its GPUs in each other mode that fits."""
    now = ModeTime(config.trainer.async_training.mode, {}, *_simulated(config, predict))
    best: dict[str, ModeTime] = {}
    allowed = problems_of(config)
    for changes, cluster in _candidates(config.trainer, predict.cluster):
        mode, changed = str(changes[MODE]), with_options(config, changes)
        if mode == now.mode or not problems_of(changed) <= allowed or plan(changed).misfits():
            continue
        found = ModeTime(mode, changes, *_simulated(changed, replace(predict, cluster=cluster)))
        if mode not in best or best[mode].rate < found.rate:
            best[mode] = found
    return [now, *sorted(best.values(), key=lambda found: -found.rate)]


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
    """Return a cluster with so many GPUs; None if they are not whole nodes."""
    if gpus % like.gpus == 0:
        return replace(like, nodes=gpus // like.gpus) if gpus else None
    return replace(like, gpus=gpus) if 0 < gpus < like.gpus else None


def _simulated(config: C, predict: Predictor[C]) -> tuple[SimulatedRun, float]:
    """Simulate a run whose micro batch sizes are numbers; returns it and the rate of all engines."""
    training = config.trainer.async_training
    engine = predict.describe(config).engine
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
        warm_up=WARM_UP,
    )
    return run, run.rate / share


def predicted_costs(config: C, predict: Predictor[C], engine: PlannedEngine) -> Costs:
    """Predict what a simulation needs from the phases of a step."""
    step, run, cluster, lengths = (
        predict(config),
        predict.describe(config),
        predict.cluster,
        predict.lengths(config),
    )
    policy = held_model(run.models[0], cluster.world_size, "cuda", predict.read_shape).shape
    has_adapters = run.serves_adapters("cuda")
    sampled = sampling_time(engine, policy, lengths, cluster, has_adapters=has_adapters)
    context = lengths.prompt + lengths.responses.mean_square / 2 / lengths.responses.mean

    @cache
    def decoding(running: int) -> float:
        parts = decoding_step(engine, policy, cluster, running, context, has_adapters=has_adapters)
        return sum(parts.values())

    sync = step.phase("sync_weights").seconds
    total = sum(phase.seconds for phase in step.phases) - step.phase("gen").seconds
    return Costs(
        decoding,
        sampled.prompts / max(1.0, engine.prompts * lengths.prompt),
        total - sync if config.worker.hybrid_engine else total,  # else it sends the weights
        sync,
        sampled.at_once,
    )


def drawn_lengths(responses: Responses, seed: int = 0) -> Iterator[float]:
    """Yield lengths of random responses."""
    rng, rate = random.Random(seed), 1 / responses.scale
    while True:
        yield max(1.0, min(responses.maximum, rng.expovariate(rate)))
