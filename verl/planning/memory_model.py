# SPDX-License-Identifier: Apache-2.0
"""Memory of a sharded transformer on one rank, in bytes: formulas alone, without torch.

`layer_sizes` explains the letters. `docs/memory.md` compares the results with measured peaks.
"""

import math
from dataclasses import dataclass, replace

from verl.distributed.backends import on_gpu
from verl.planning.layer_sizes import NORM_BYTES, Stack

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SENT_BYTES = 1 << 26  # of a weight that is read, see `workers/model_builder.py`
CHUNK_BYTES = {False: 256 << 20, True: 1 << 30}  # of logits, by `on_gpu`, see `models/head/logit_chunks.py`
BLOCK_BYTES = {False: 4 * (2 << 20), True: 0}  # four float32 tensors of a softmax; kernels need none
PRODUCT_ROWS = 1 << 14  # of the head's gradient made at once


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. `…stored` and `largest_row` count bytes of weights, all other fields weights."""

    params: int  # tied ones once
    stored: int
    trained: int  # weights with a gradient
    trained_stored: int
    root: int  # outside of layers: embeddings, head, last norm
    trained_root: int
    largest_stored: int  # bytes of the largest tensor
    vocab: int  # rows of the head; 1 for a scalar head
    is_tied: bool
    text: Stack
    tower: Stack | None = None
    patches_per_token: int = 4
    router_logits: int = 0  # of a token in all layers, if the loss that balances routers keeps them
    routes: int = 0  # bytes of a token's experts in all layers, if they can be replayed
    frozen_experts: int = 0  # joint tensors of experts that stay frozen without an adapter
    experts: int = 0  # weights of all joint experts
    trained_experts: int = 0
    largest_row: int = 0  # bytes in float32 of what the first index of a tensor chooses, such as an expert
    divisible_experts: int = 0  # of a layer, that `expert_parallel_size` must divide; 0: they stay whole
    has_expert_biases: bool = False
    padding: float = 1.0  # by which `padded` made the weights of experts more

    @property
    def head(self) -> int:
        return self.vocab * self.text.hidden

    @property
    def mixture_layers(self) -> int:
        return self.experts // self.text.experts if self.text.experts else 0

    @property
    def trained_head(self) -> int:
        return min(self.head, self.trained_root)

    def part(self, ranks: int) -> "ModelShape":
        """Return the part of a dense model on each of `ranks` ranks that share its layers; norms are few."""
        if ranks == 1:
            return self
        text = replace(
            self.text,
            intermediate=self.text.intermediate // ranks,
            heads=self.text.heads // ranks,
            kv_heads=self.text.kv_heads // ranks,
            params=self.text.params // ranks,
        )
        divided = ("params", "stored", "trained", "trained_stored", "root", "trained_root")
        counts = {name: getattr(self, name) // ranks for name in divided}
        return replace(self, vocab=max(1, self.vocab // ranks), text=text, **counts)

    def divides_into(self, size: int) -> bool:
        """Return whether the experts of a layer can be divided over `size` ranks."""
        return size == 1 or (self.divisible_experts > 0 and self.divisible_experts % size == 0)

    @property
    def trained_text(self) -> str:
        """A sentence on how much of the model is trained."""
        share = 100 * self.trained / self.params
        text = f"{self.trained:,} of {self.params:,} parameters are trained ({share:.2f} %)"
        if self.frozen_experts:
            text += f"; {self.frozen_experts} joint tensors of experts are not, see `lora.target_parameters`"
        return text


@dataclass(frozen=True)
class ModelSetup:
    """Options of a rank that holds and runs a model."""

    device: str  # of `BACKENDS`
    ranks: int  # that share one copy of the weights, or of the part on each rank that shares layers
    c: int  # bytes of a number in forward and backward
    r: int = 4  # bytes of a gradient while it is summed over ranks
    checkpointing: float = True  # share of the blocks whose activations are recomputed, the first ones
    keeps_gathered: bool = False  # layers stay gathered from forward to backward
    optimizer: str = "adamw"
    expert_ranks: int = 1  # that the experts of a layer are divided over
    layer_ranks: int = 1  # that each layer is divided over
    is_compiled: bool = False  # blocks of the text: their elementwise operations are fused
    reduces_once: bool = False  # copies of the weights sum their gradients once in an optimizer step

    @property
    def expert_shards(self) -> int:
        """Ranks that share one part of divided experts."""
        return self.ranks // self.expert_ranks


@dataclass(frozen=True)
class MicroBatch:
    """The tokens that one rank runs at once."""

    tokens: int
    responses: int  # tokens whose log-probs are needed
    patches: int = 0  # inputs of the vision tower
    media: int = 0  # tokens that features replace


def padded(shape: ModelShape, setup: ModelSetup) -> ModelShape:
    """Count experts as on the first ranks: FSDP gives each rank as many, the last ranks fewer or none."""
    held, shards = shape.divisible_experts // setup.expert_ranks, setup.expert_shards
    places = math.ceil(held / shards) * shards
    if places == held or shape.padding > 1:
        return shape

    def more(experts: int) -> int:
        return experts * (places - held) // held

    number, trained = shape.stored / shape.params, shape.trained_stored / max(shape.trained, 1)
    text = replace(
        shape.text,
        params=shape.text.params + more(shape.text.experts),
        experts=shape.text.experts + more(shape.text.experts),
    )
    return replace(
        shape,
        text=text,
        params=shape.params + more(shape.experts),
        stored=shape.stored + int(number * more(shape.experts)),
        trained=shape.trained + more(shape.trained_experts),
        trained_stored=shape.trained_stored + int(trained * more(shape.trained_experts)),
        experts=shape.experts + more(shape.experts),
        trained_experts=shape.trained_experts + more(shape.trained_experts),
        padding=places / held,
    )


def weights(shape: ModelShape, setup: ModelSetup) -> int:
    return padded(shape, setup).stored // setup.ranks


def gradients(shape: ModelShape, setup: ModelSetup) -> int:
    """The shard of the gradients, which have the type of the weights, but that of the reduction before."""
    shape = padded(shape, setup)
    return max(shape.trained_stored, setup.reduces_once * setup.r * shape.trained) // setup.ranks


def optimizer_state(shape: ModelShape, setup: ModelSetup) -> int:
    shape = padded(shape, setup)
    trained, stored = shape.trained, shape.trained_stored
    outside = stored * shape.trained_root // max(trained, 1)
    sizes = {
        "adamw": 2 * stored,
        "adamw_bf16": 2 * stored + 4 * trained,  # first moment and rounding error; second moment in float32
        "adamw_bf16_sr": 2 * stored,
        "adamw_8bit": 2 * trained * (256 + 4) // 256,  # a float32 scale for each 256 numbers
        "muon": stored + outside,  # one moment of each layer's matrices, AdamW's two of the rest
    }
    # An optimizer of a file is assumed to need as much as AdamW.
    return sizes.get(setup.optimizer, sizes["adamw"]) // setup.ranks


def gathered(shape: ModelShape, setup: ModelSetup) -> int:
    """Gathered weights in a forward pass: the root's, and those of the layers that FSDP has fetched."""
    # On several ranks weights are held both as received and as read, and the last layer's still exist.
    shape = padded(shape, setup)
    copies, layer = 1 if setup.ranks == 1 else 3, shape.text.held(setup.expert_ranks)
    if setup.keeps_gathered:
        elsewhere = shape.experts - shape.experts // setup.expert_ranks
        return setup.c * (shape.params - elsewhere) + (copies - 1) * setup.c * layer
    return setup.c * (min(copies, 2) * shape.root + copies * layer)


def reading(shape: ModelShape) -> int:
    """The first rank while it reads a model: a block of a weight as it was read, and as it is sent.

    A block is at least a row. Experts are read one by one, or some together: what comes from the files is as
    large as what it is joined to.
    """
    # Pages of the files are not counted: the kernel evicts them first.
    return 2 * max(min(shape.largest_stored, SENT_BYTES), shape.largest_row)


def logit_chunk(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Logits held at once, and the softmax over a block of them."""
    number = setup.c if setup.device == "cpu" else 4
    rows = min(batch.responses, max(1, CHUNK_BYTES[on_gpu(setup.device)] // (number * shape.vocab)))
    logits = number * rows * shape.vocab
    return logits + min(4 * 4 * rows * shape.vocab, BLOCK_BYTES[on_gpu(setup.device)])


def saved_activations(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Activations of all layers, saved for the backward pass when the forward pass ends."""
    c, share = setup.c, setup.checkpointing
    total = shape.text.kept(c, share) * batch.tokens
    total += (shape.text.layers - shape.text.recomputed(share)) * c * shape.text.adapted_experts
    if shape.tower is not None:
        total += shape.tower.kept(c, share) * batch.patches
    return total + c * shape.router_logits * batch.tokens


def _last_activations(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Activations of the last norm and of the head's input, freed before the last layer runs backward."""
    c, hidden = setup.c, shape.text.hidden
    return (NORM_BYTES + 2 * c) * hidden * batch.tokens + c * hidden * batch.responses


def log_prob_peak(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Peak of a pass without gradients, in addition to the model at rest."""
    shape = padded(shape, setup)
    if setup.device != "cpu" and not setup.keeps_gathered:
        return _gpu_log_prob_peak(shape, setup, batch)
    in_layer = shape.text.transient(setup.c, batch.tokens) + setup.c * shape.text.adapted_experts
    in_layer += shape.text.arrived(setup.c, batch.tokens, setup.expert_ranks)
    if shape.tower is not None:
        in_layer = max(in_layer, shape.tower.transient(setup.c, batch.patches))
    states = setup.c * shape.text.hidden * (batch.tokens + batch.responses)
    in_head = states + logit_chunk(shape, setup, batch)
    layer = setup.c * shape.text.held(setup.expert_ranks) * (1 if setup.ranks == 1 else 3)
    return gathered(shape, setup) - layer + max(in_layer + layer, in_head)


def _gpu_log_prob_peak(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """The largest of first layer, a layer in the middle, and head, in the order in which FSDP frees."""
    text, c, is_alone = shape.text, setup.c, setup.ranks == 1
    root, layer = c * shape.root, c * text.held(setup.expert_ranks)
    in_layer, states = text.transient(c, batch.tokens), c * text.hidden * batch.tokens
    in_layer += c * text.adapted_experts
    layers = (1 if is_alone else 3) * layer + in_layer
    if setup.expert_ranks > 1:
        layers = _divided_layer(text, setup, batch)
    if shape.tower is not None and batch.patches:
        layers = max(layers, (1 if is_alone else 3) * layer + shape.tower.transient(c, batch.patches))
    head = root + (0 if is_alone else layer) + states + c * text.hidden * batch.responses
    return max(_first_layer(shape, setup, batch), root + layers, head + logit_chunk(shape, setup, batch))


def _first_layer(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Gathered weights when the first layer begins: what the root received is freed only then."""
    text, c = shape.text, setup.c
    # Divided experts arrive after the rest of their layer.
    layer = text.params if setup.expert_ranks == 1 else text.undivided
    entering = c * text.hidden * batch.tokens
    if shape.tower is not None and batch.patches:  # its layers come first
        layer, entering = shape.tower.params, shape.tower.transient(c, batch.patches)
    return (1 if setup.ranks == 1 else 2) * c * (shape.root + layer) + entering


def _divided_layer(text: Stack, setup: ModelSetup, batch: MicroBatch) -> int:
    """A layer without gradients whose experts FSDP gathers after the rest, when they are needed.

    Then they are held as received and as read, with the states that arrived, in order, and two results of
    experts, or those of gate and up and their product.
    """
    c, states = setup.c, setup.c * text.hidden * batch.tokens
    experts = text.held(setup.expert_ranks) - (text.params - text.experts)
    arrived = text.arrived(c, batch.tokens, setup.expert_ranks)
    product = 3 * c * text.intermediate * batch.tokens
    running = c * (2 * experts + text.params - text.experts) + 2 * arrived + max(2 * arrived, product)
    # Before, the rest of a layer runs as it does with any experts.
    return max(running + 2 * states, 3 * c * text.undivided + text.transient(c, batch.tokens))


def update_peak(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Peak of a forward and backward pass, in addition to weights, gradients and optimizer state."""
    shape = padded(shape, setup)
    before = setup.c * shape.root + saved_activations(shape, setup, batch)
    return max(
        _first_layer(shape, setup, batch),
        before + _last_activations(shape, setup, batch) + _head_backward(shape, setup, batch),
        before + _layer_backward(shape, setup, batch),
        _root_backward(shape, setup),
    )


def _head_backward(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Recomputed logits, the head's gradient summed over chunks, and that of the hidden states."""
    number = setup.c if setup.device == "cpu" else 4
    is_single_chunk = batch.responses * number * shape.vocab <= CHUNK_BYTES[on_gpu(setup.device)]
    rows, head = min(PRODUCT_ROWS, shape.vocab), shape.trained_head
    by_chunks = 4 * head + setup.c * rows * shape.text.hidden
    summed = setup.c * head if is_single_chunk or not head else by_chunks
    return logit_chunk(shape, setup, batch) + summed + setup.c * shape.text.hidden * batch.responses


def _layer_backward(shape: ModelShape, setup: ModelSetup, batch: MicroBatch) -> int:
    """Backward pass of the last layer, with FSDP's buffers and the head's gradient."""
    text, c, ranks = shape.text, setup.c, setup.ranks
    # Some recomputed: the last layer is not, and once one is, what the last one saved is freed.
    recomputes = setup.checkpointing == 1
    tokens = text.backward(c, batch.tokens, recomputes=recomputes)
    tokens += c * text.adapted_experts * (2 if recomputes else 1)  # the sum and its gradient
    if shape.tower is not None:
        tokens = max(tokens, shape.tower.backward(c, batch.patches, recomputes=recomputes))
    if setup.expert_ranks > 1:
        return c * shape.trained_head + _divided_layer_backward(shape, setup, batch, tokens)
    fetched = 1 if ranks == 1 else 2  # this layer's weights, and the next one's while they arrive
    trained = text.params * shape.trained // shape.params
    gradients = (c + setup.r) * trained  # of this layer, and those of the previous one while they are sent
    if text.tiles(batch.tokens):
        gradients += 4 * trained  # sums over tiles
    received = int(setup.r * (1 + 1 / ranks) * trained)
    return c * shape.trained_head + max(tokens + fetched * c * text.params + gradients, received)


def _divided_layer_backward(shape: ModelShape, setup: ModelSetup, batch: MicroBatch, tokens: int) -> int:
    """The same of a layer whose experts FSDP gathers and reduces apart from the rest.

    While experts run backward, the rest of the next layer arrives and gradients of the previous one's are
    sent; then the experts' own gradients are, with what attention has saved, or while its gradients are made.
    """
    text, c = shape.text, setup.c
    experts = text.held(setup.expert_ranks) - (text.params - text.experts)
    rest, share = text.params - text.experts, shape.trained / shape.params
    trained = int(experts * shape.trained_experts / max(shape.experts, 1))
    running = tokens + text.arrived(c, batch.tokens, setup.expert_ranks) * (
        2 if setup.checkpointing == 1 else 1
    )
    gathered = c * (rest + text.undivided)  # and what arrives of the next layer
    running += c * experts + gathered + int(c * trained / shape.padding) + int(setup.r * share * rest)
    sent = max(int(c * trained / shape.padding), text.latent_backward(c, batch.tokens))
    sent += int(setup.r * (1 + 1 / setup.expert_shards) * trained) + gathered
    if setup.checkpointing == 1:
        sent += (text.saved_by_attention(c) + c * text.hidden) * batch.tokens
    return max(running, sent)


def _root_backward(shape: ModelShape, setup: ModelSetup) -> int:
    """The embeddings' gradient joins the head's, and both are summed over the ranks."""
    root, head = shape.trained_root, shape.trained_head if shape.is_tied else 0
    joined = setup.c * (shape.root + root + head)  # weights, their gradients, and the head's
    sent = setup.c * shape.root + setup.r * root
    copies = 2 if setup.device == "cpu" and setup.ranks > 1 else 1  # gloo sends a copy
    received = int(setup.r * root * (copies + 1 / setup.ranks))
    return max(joined, sent, received)
