# SPDX-License-Identifier: Apache-2.0
"""Operations of a pass, and bytes that its elementwise kernels read and write and its ranks exchange.

As `verl.models.flops` counts them, but from the sizes of a plan; and with the work that is done twice: blocks
under gradient checkpointing, and the head, whose logits are made again in the backward pass.
"""

from dataclasses import dataclass

from verl.planning.layer_sizes import Stack
from verl.planning.memory_model import ModelSetup, ModelShape, padded
from verl.planning.speed.workload import PassWork

BACKWARD_PAIRS = 2.5  # of FlashAttention, which computes the scores again
# Bytes for each number of a token's states in one eager layer's forward pass, with two-byte states.
NORM_BYTES = 36  # read and written by a norm in float32: casts, square, mean, products
RESIDUAL_BYTES = 6
ROTARY_BYTES = 24  # halves, negation, two products and a sum
GATE_BYTES = 10  # activation and product
FUSED_BYTES = 4, 6, 4, 6  # the same four in compiled blocks: each number is read and written once
BACKWARD_BYTES = 2.0  # for each byte of the forward pass
# For each float32 logit, forward and backward: read once, and overwritten by its gradient.
LOGIT_BYTES = 4, 6


@dataclass(frozen=True)
class Operations:
    """Floating-point operations by the kind of kernel, and the bytes of the others."""

    products: float
    attention: float
    head: float
    elementwise: float  # bytes
    softmax: float  # bytes


def layer_weights(stack: Stack) -> int:
    """Weights of a layer that a token is multiplied with."""
    attention, cached = stack.heads * stack.head_dim, stack.kv_heads * stack.head_dim
    around = 2 * stack.hidden * (attention + cached)
    if (latent := stack.latent) is not None:
        around = stack.hidden * (latent.queries + latent.keys + latent.rotary)
        around += stack.hidden * stack.heads * latent.value_dim
        around += (latent.queries or stack.hidden) * attention + latent.keys * stack.expanded
    routed = around + 3 * stack.hidden * stack.intermediate
    return min(stack.params, routed)  # less in a mixture; towers have two matrices in an MLP, not three


def layer_bytes(stack: Stack, *, is_compiled: bool = False) -> int:
    """Bytes that the elementwise kernels of a layer read and write for a token."""
    eager = NORM_BYTES, RESIDUAL_BYTES, ROTARY_BYTES, GATE_BYTES
    norm, residual, rotary, gate = FUSED_BYTES if is_compiled else eager
    rotated = (stack.heads + stack.kv_heads) * stack.head_dim
    norms = 2 * stack.hidden + (rotated if stack.has_head_norms else 0)
    return norm * norms + 2 * residual * stack.hidden + rotary * rotated + gate * stack.intermediate


def forward(shape: ModelShape, work: PassWork, *, is_compiled: bool = False) -> Operations:
    """Count one forward pass over all rows of a step; blocks of the text may be compiled."""
    text, tower = shape.text, shape.tower
    products = 2.0 * text.layers * layer_weights(text) * work.tokens
    attention = 4.0 * text.layers * text.heads * text.head_dim * work.pairs
    elementwise = float(text.layers * layer_bytes(text, is_compiled=is_compiled)) * work.tokens
    if tower is not None:
        products += 2.0 * tower.layers * layer_weights(tower) * work.patches
        per_image = work.patches / work.images if work.images else 0.0
        attention += 4.0 * tower.layers * tower.hidden * work.patches * per_image
        elementwise += tower.layers * layer_bytes(tower) * work.patches
    head = 2.0 * shape.head * work.responses
    softmax = LOGIT_BYTES[0] * shape.vocab * work.responses if shape.vocab > 1 else 0.0
    return Operations(products, attention, head, elementwise, softmax)


def update(shape: ModelShape, setup: ModelSetup, work: PassWork) -> Operations:
    """Count forward and backward passes, with what is done twice."""
    once = forward(shape, work, is_compiled=setup.is_compiled)
    again = shape.text.recomputed(setup.checkpointing) / shape.text.layers
    weight_gradients = shape.trained / shape.params  # frozen weights have none
    products = once.products * (2 + again + weight_gradients) - again * _not_again(shape, work)
    return Operations(
        products,
        once.attention * (1 + again + BACKWARD_PAIRS),
        once.head * ((3 if shape.vocab > 1 else 2) + (shape.trained_head > 0)),
        once.elementwise * (1 + again + BACKWARD_BYTES),
        once.softmax * (1 + LOGIT_BYTES[1] / LOGIT_BYTES[0]),
    )


def _not_again(shape: ModelShape, work: PassWork) -> float:
    """Products of the blocks' last matrices: nothing in the backward pass needs their results.

    Those of experts are weighted after it, and adapters follow it; MLPs in tiles compute it.
    """
    if shape.text.tiles(int(work.tokens / work.micro_batches)):
        return 0.0
    dense = shape.text.layers - shape.mixture_layers
    is_whole = shape.trained == shape.params
    return 2.0 * dense * shape.text.hidden * shape.text.intermediate * work.tokens if is_whole else 0.0


def needed_by_update(shape: ModelShape, work: PassWork) -> float:
    """Operations that an update cannot do without, which MFU counts."""
    once = forward(shape, work)
    products = once.products * (2 + shape.trained / shape.params)
    return products + 3 * once.attention + (2 + (shape.trained_head > 0)) * once.head


@dataclass(frozen=True)
class Collectives:
    """Bytes that a rank receives, by the ranks that take part."""

    sharding: float  # all-gathers and reduce-scatters of weights and gradients, but divided experts'
    replicas: float  # all-reduces of gradients between copies of the weights
    heads: float  # all-to-alls of Ulysses
    ring: float  # keys and values that travel around
    expert_sharding: float  # the same of divided experts, between the ranks that hold the same ones
    experts: float  # all-to-alls of tokens to divided experts and back
    sums: float  # all-reduces of activations between ranks that share layers


def _others_shards(params: float, experts: float, setup: ModelSetup) -> tuple[float, float]:
    """Weights that a rank receives when each gathers `params` and its part of divided `experts` in them."""
    shards, experts = setup.expert_shards, experts if setup.expert_ranks > 1 else 0.0
    rest = (params - experts) * (setup.ranks - 1) / setup.ranks
    return rest, experts / setup.expert_ranks * (shards - 1) / shards


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
    """Count a pass over all rows of a step; each micro batch gathers weights and scatters gradients."""
    passes, shape = 2 if is_update and not setup.keeps_gathered else 1, padded(shape, setup)
    # The root stays gathered until a backward pass.
    root = setup.c * shape.root * (setup.ranks - 1) / setup.ranks
    tower = 0 if shape.tower is None or work.patches else shape.tower.layers * shape.tower.params
    rest, experts = _others_shards(shape.params - tower, shape.experts, setup)  # one that does not run
    gathers = work.micro_batches * passes
    sharding = gathers * (setup.c * rest - root) + root * (work.micro_batches if is_update else 1)
    expert_sharding, replicas = gathers * setup.c * experts, 0.0
    if is_update:
        rest, experts = _others_shards(shape.trained, shape.trained_experts, setup)
        sharding += work.micro_batches * setup.r * rest
        expert_sharding += work.micro_batches * setup.r * experts
        sums = work.repeats if setup.reduces_once else work.micro_batches
        replicas = 2 * sums * setup.r * shape.trained / setup.ranks * (copies - 1) / copies
    text = shape.text
    queries, cached = (heads * (text.head_dim + text.value_dim) for heads in (text.heads, text.kv_heads))
    # Queries, keys, values and the output; their gradients; and once more where blocks are computed again.
    times = (2 + setup.checkpointing) if is_update else 1
    numbers = times * setup.c * work.tokens
    heads = numbers * text.layers * (queries + cached) * (ulysses - 1) / ulysses
    around = numbers * text.layers * cached * (ring - 1)
    routed = numbers * shape.mixture_layers * 2 * text.choices * text.hidden  # to the experts and back
    routed *= (setup.expert_ranks - 1) / setup.expert_ranks
    # After attention and MLP, and in the backward pass of their inputs; a block that is computed again stops
    # before the last sum. And after the embedding, and in the backward pass before the head.
    summed = text.layers * ((4 + setup.checkpointing) if is_update else 2) + 1
    summed = setup.c * text.hidden * (summed * work.tokens + is_update * work.responses)
    sums = summed * 2 * (setup.layer_ranks - 1) / setup.layer_ranks  # each is sent and received
    return Collectives(sharding, replicas, heads, around, expert_sharding, routed, sums)
