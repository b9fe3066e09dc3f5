# SPDX-License-Identifier: Apache-2.0
"""Bytes between ranks and between host and device, for one rank in a step."""

from dataclasses import dataclass

from verl.planning.memory_model import ModelSetup, ModelShape
from verl.planning.speed.workload import PassWork


@dataclass(frozen=True)
class Collectives:
    """Bytes that a rank receives, by the ranks that take part."""

    sharding: float  # all-gathers and reduce-scatters of weights and gradients, but divided experts'
    replicas: float  # all-reduces of gradients between copies of the weights
    heads: float  # all-to-alls of Ulysses
    ring: float  # keys and values that travel around
    expert_sharding: float  # the same of divided experts, between the ranks that hold the same ones
    experts: float  # all-to-alls of tokens to divided experts and back


def _others_shards(params: float, experts: float, setup: ModelSetup) -> tuple[float, float]:
    """Weights that a rank receives when each gathers `params` and its part of divided `experts` in them."""
    shards, experts = setup.expert_shards, experts if setup.expert_ranks > 1 else 0.0
    rest = (params - experts) * (setup.ranks - 1) / setup.ranks
    return rest, experts / setup.expert_ranks * (shards - 1) / shards


def gathered_bytes(shape: ModelShape, setup: ModelSetup) -> float:
    """Bytes that a rank receives when all weights are gathered once."""
    return setup.c * shape.params * (setup.ranks - 1) / setup.ranks


def collectives(
    shape: ModelShape,
    setup: ModelSetup,
    work: PassWork,
    *,
    is_update: bool,
    copies: int = 1,  # of the weights, with hybrid sharding
    ulysses: int = 1,
    ring: int = 1,
) -> Collectives:
    """Count a pass over all rows of a step; each micro batch gathers weights and reduces gradients."""
    passes = 2 if is_update and not setup.keeps_gathered else 1
    # The root stays gathered until a backward pass.
    root = setup.c * shape.root * (setup.ranks - 1) / setup.ranks
    rest, experts = _others_shards(shape.params, shape.experts, setup)
    gathers = work.micro_batches * passes
    sharding = gathers * (setup.c * rest - root) + root * (work.micro_batches if is_update else 1)
    expert_sharding, replicas = gathers * setup.c * experts, 0.0
    if is_update:
        gradients = work.micro_batches * setup.r * shape.trained
        rest, experts = _others_shards(shape.trained, shape.trained_experts, setup)
        sharding += work.micro_batches * setup.r * rest
        expert_sharding += work.micro_batches * setup.r * experts
        replicas = 2 * gradients / setup.ranks * (copies - 1) / copies
    text = shape.text
    queries, cached = text.heads * text.head_dim, text.kv_heads * text.head_dim
    # Queries, keys, values and the output; their gradients; and once more where blocks are computed again.
    times = (2 + setup.checkpointing) if is_update else 1
    states = times * text.layers * setup.c * work.tokens
    heads = states * (2 * queries + 2 * cached) * (ulysses - 1) / ulysses
    around = states * 2 * cached * (ring - 1)
    routed = states * 2 * text.choices * text.hidden  # to the experts and back
    routed *= (setup.expert_ranks - 1) / setup.expert_ranks
    return Collectives(sharding, replicas, heads, around, expert_sharding, routed)


def offloaded_bytes(weights: int, state: int, *, is_update: bool) -> float:
    """Bytes that a pass of an offloaded model copies in both directions.

    Copies in host memory are kept: weights return there only after an update, which alone needs the state.
    """
    return 2.0 * (weights + state) if is_update else float(weights)
