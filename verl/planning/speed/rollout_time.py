# SPDX-License-Identifier: Apache-2.0
"""Seconds of a rollout: prompts at once, then token by token while the batch shrinks.

A decoding step reads all weights and the keys and values of the running sequences, so memory sets its pace
until many run; a batch is as slow as its longest responses.
"""

from collections import defaultdict

from verl.planning.memory_model import ModelShape
from verl.planning.planned_run import PlannedEngine
from verl.planning.speed.cluster import Cluster
from verl.planning.speed.operations import layer_weights
from verl.planning.speed.workload import MEDIA_SHARE, MEDIA_TOKENS, ExpectedLengths

PREFILL_SHARE = 0.7  # of the speed of training products: many short prompts in limited steps
STEP_SECONDS = 2.5e-3  # of the engine's own code and of the graph's launch in each decoding step
EAGER_LAYER_SECONDS = 0.35e-3  # of launching one layer's kernels without a graph
ADAPTER_LAYER_SECONDS = 1.4e-3  # the same of its adapters, from a published run
SEQUENCE_SECONDS = 12e-6  # of scheduling, sampling and log-probs for each running sequence and step
REDUCE_SECONDS = 20e-6  # of starting an all-reduce between the ranks of an engine
IMAGE_SECONDS = 0.02  # of a processor on one core for an image
SAMPLER_BYTES = 24  # for each logit: float32 copies, log-softmax, noise
ACTIVATION_GIB = 2.0  # of the engine, in addition to weights and cache
SEGMENTS = 48


def sampling_time(
    engine: PlannedEngine,
    policy: ModelShape,
    lengths: ExpectedLengths,
    cluster: Cluster,
    *,
    has_adapters: bool = False,  # that the engine applies
) -> dict[str, float]:
    """Predict the seconds of one call of an engine, by cause: `prompts`, and those of `decoding_step`."""
    sequences = engine.prompts * engine.options.n
    at_once = min(sequences, sequences_at_once(engine, policy, lengths, cluster))
    prompts, images = _prompts(engine, policy, lengths, cluster)
    totals: dict[str, float] = defaultdict(float, prompts=prompts)
    for steps, running, context in _schedule(sequences, at_once, lengths):
        parts = decoding_step(engine, policy, cluster, running, context, has_adapters=has_adapters)
        for name, seconds in parts.items():
            totals[name] += steps * seconds
    totals["engine"] += images
    return totals


def sequences_at_once(
    engine: PlannedEngine, policy: ModelShape, lengths: ExpectedLengths, cluster: Cluster
) -> int:
    """Return how many sequences an engine samples at once, as far as its cache holds them."""
    options, tokens = engine.options, lengths.prompt / engine.options.n + lengths.responses.mean
    sequence = engine.number * policy.text.cached(tokens, options.tensor_parallel_size)
    used = options.gpu_memory_utilization * cluster.gpu.memory_bytes
    in_cache = int((used - engine.weights(policy) - ACTIVATION_GIB * 2**30) / sequence)
    return max(1, min(in_cache, options.sequences_at_once(on_gpu=True)))


def decoding_step(
    engine: PlannedEngine,
    policy: ModelShape,
    cluster: Cluster,
    running: float,
    context: float,
    *,
    has_adapters: bool = False,
) -> dict[str, float]:
    """Predict the seconds of one token of all running sequences, with a mean context, by cause.

    `weights` and `cache` are reading; `products` what goes beyond reading weights; `reduces` between ranks;
    `engine` its own code and sampling, and in a whole call also the processing of images.
    """
    options, text, number = engine.options, policy.text, engine.number
    ranks = options.tensor_parallel_size
    dense = (policy.params - text.layers * (text.params - layer_weights(text))) / ranks
    # In a mixture the running tokens spread over the experts.
    held = engine.weights(policy)
    touched = min(held, held * ranks / policy.params * dense * _spread(policy, running))
    weights = touched / cluster.memory
    flops = 2 * _active(engine, policy) * running / cluster.products
    sampler = running * SAMPLER_BYTES * policy.vocab / ranks / cluster.memory
    layer = EAGER_LAYER_SECONDS + ADAPTER_LAYER_SECONDS * has_adapters if options.enforce_eager else 0.0
    reduces = 0.0
    if ranks > 1:
        moved = 2 * running * text.hidden * number * (ranks - 1) / ranks / cluster.link(ranks)
        reduces = 2 * text.layers * (REDUCE_SECONDS + moved)
    return {
        "weights": weights,
        "cache": running * number * text.cached(context, ranks) / cluster.memory,
        "products": max(0.0, flops - weights),
        "reduces": reduces,
        "engine": STEP_SECONDS + SEQUENCE_SECONDS * running + sampler + layer * text.layers,
    }


def _active(engine: PlannedEngine, policy: ModelShape) -> float:
    """Weights of a rank that one token is multiplied by."""
    text = policy.text
    return (text.layers * layer_weights(text) + policy.head) / engine.options.tensor_parallel_size


def _prompts(
    engine: PlannedEngine, policy: ModelShape, lengths: ExpectedLengths, cluster: Cluster
) -> tuple[float, float]:
    """Seconds of the prompts' products, each prompt once, and of processing their images."""
    tokens, ranks = engine.prompts * lengths.prompt, engine.options.tensor_parallel_size
    pairs = engine.prompts * lengths.prompt**2 / 2
    flops = (
        2 * _active(engine, policy) * tokens
        + 4 * policy.text.layers * policy.text.heads * policy.text.head_dim * pairs
    )
    images = 0.0
    if policy.tower is not None:
        media = MEDIA_SHARE * tokens
        patches = media * policy.patches_per_token / ranks
        flops += 2 * policy.tower.layers * layer_weights(policy.tower) * patches
        images = IMAGE_SECONDS * media / MEDIA_TOKENS
    return flops / (PREFILL_SHARE * cluster.products), images


def _schedule(sequences: int, at_once: int, lengths: ExpectedLengths) -> list[tuple[float, float, float]]:
    """Return (steps, sequences that run, tokens of context) while responses become complete."""
    responses = lengths.responses
    schedule = []
    if sequences > at_once:  # as one ends the next begins
        steps = (sequences - at_once) * responses.mean / at_once
        schedule.append((steps, float(at_once), lengths.prompt + responses.mean_square / 2 / responses.mean))
    last = responses.longest(at_once)
    for segment in range(SEGMENTS):
        middle = (segment + 0.5) * last / SEGMENTS
        running = max(1.0, at_once * responses.running(middle))
        schedule.append((last / SEGMENTS, running, lengths.prompt + middle))
    return schedule


def _spread(policy: ModelShape, running: float) -> float:
    """Weights that a decoding step reads, over those of one token: above 1 in a mixture."""
    one = layer_weights(policy.text) / policy.text.params
    return (1 - (1 - one) ** running) / one if one < 0.9 else 1.0
