# SPDX-License-Identifier: Apache-2.0
"""How many bytes a sharded transformer takes, by what it does; arithmetic alone, without torch.

Letters as everywhere: `H` hidden size, `N` tokens of a line, `V` vocabulary. `c` is the bytes of a number in
forward and backward. All results are bytes on one rank, at the moment named.
"""

from dataclasses import dataclass

NORM_BYTES = 4  # norms compute in float32 and keep their input so
CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # of logits, see `head_logits.py`
BLOCK_BYTES = {"cpu": 4 * (2 << 20), "cuda": 4 * (256 << 20)}  # four float32 tensors of a softmax
PRODUCT_ROWS = 1 << 14  # of the head's gradient made at once


@dataclass(frozen=True)
class Stack:
    """Equal transformer layers: those of the language model, or of the vision tower.

    Example::

        Stack(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, params=...)
    """

    layers: int
    hidden: int
    intermediate: int  # that a token runs through: of a mixture, of its experts together
    heads: int
    kv_heads: int
    head_dim: int
    params: int  # of the largest layer
    has_head_norms: bool = False  # of queries and keys

    def saved(self, c: int) -> int:
        """What a layer keeps of a token for its backward pass.

        norms 2 (4 H + 2 c H)     queries, keys, values, output 4 c A     gated product 4 c I
        """
        attention = self.heads * self.head_dim
        norms = 2 * (NORM_BYTES + 2 * c) * self.hidden
        if self.has_head_norms:
            norms += (NORM_BYTES + c) * (attention + self.kv_heads * self.head_dim)
        return norms + 4 * c * attention + 4 * c * self.intermediate

    def passing(self, c: int) -> int:
        """What a token takes for a moment where nothing is kept: its states, and the widest of the steps."""
        attention = self.heads * self.head_dim
        widest = max(3 * c * self.intermediate, 2 * NORM_BYTES * self.hidden, 5 * c * attention)
        return 2 * c * self.hidden + widest

    def gradients(self, c: int) -> int:
        """What the backward pass of a layer adds for a token to what was kept."""
        return c * self.hidden + max(2 * c * self.intermediate, 2 * NORM_BYTES * self.hidden)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that memory follows from.

    Example::

        ModelShape(params=494032768, stored=1976131072, learning=494032768, learning_stored=1976131072, ...)
    """

    params: int  # tied ones once
    stored: int  # bytes of them
    learning: int  # those with a gradient
    learning_stored: int  # bytes of these
    root: int  # those outside of layers: embeddings, head, last norm
    learning_root: int  # of these, with a gradient
    largest_stored: int  # bytes of the largest tensor
    vocab: int  # rows of the head; 1 for a score
    is_tied: bool
    text: Stack
    tower: Stack | None = None
    merge: int = 4  # patches of a media token
    bare_experts: int = 0  # joint tensors of experts that stay as they are because no adapter fits them

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.vocab * self.text.hidden

    @property
    def trained_text(self) -> str:
        """How much of it is trained, for a person."""
        share = 100 * self.learning / self.params
        text = f"{self.learning:,} of {self.params:,} parameters are trained ({share:.2f} %)"
        if self.bare_experts:
            text += f"; {self.bare_experts} joint tensors of experts are not, no adapter fits them"
        return text

    @property
    def learning_head(self) -> int:
        """Those with a gradient."""
        return min(self.head, self.learning_root)


@dataclass(frozen=True)
class Handling:
    """How a rank holds and runs a model."""

    device: str  # "cuda" or "cpu"
    ranks: int  # that share one copy of the weights
    c: int  # bytes of a number in forward and backward
    r: int = 4  # bytes of a gradient while it is summed over ranks
    checkpointing: bool = True  # activations are recomputed
    keeps_gathered: bool = False  # weights of layers stay gathered from forward to backward
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Line:
    """The tokens that one rank runs at once."""

    tokens: int
    responses: int  # of them, those whose log-probs are wanted
    patches: int = 0  # that the vision tower runs


def weights(shape: ModelShape, how: Handling) -> int:
    """The shard of the weights."""
    return shape.stored // how.ranks


def gradients(shape: ModelShape, how: Handling) -> int:
    """The shard of the gradients, in the type of the weights."""
    return shape.learning_stored // how.ranks


def optimizer_state(shape: ModelShape, how: Handling) -> int:
    """The shard of what the optimizer keeps.

    AdamW has two moments in the type of the weights; `adamw_bf16` the first and what was rounded away in that
    type, the second in float32; `adamw_8bit` a byte of each and a scale for 256; `muon` one of a layer's
    matrices and AdamW's two of the rest.
    """
    learning, stored = shape.learning, shape.learning_stored
    outside = stored * shape.learning_root // max(learning, 1)
    sizes = {
        "adamw": 2 * stored,
        "adamw_bf16": 2 * stored + 4 * learning,
        "adamw_bf16_sr": 2 * stored,
        "adamw_8bit": 2 * learning * (256 + 4) // 256,
        "muon": stored + outside,
    }
    return sizes[how.optimizer] // how.ranks


def gathered(shape: ModelShape, how: Handling) -> int:
    """Whole weights at hand in a forward pass: the root's, and those of layers as FSDP fetches them.

    With several ranks weights are there as they arrived and as they are read, a layer's beside the last one.
    """
    copies = 1 if how.ranks == 1 else 3
    if how.keeps_gathered:
        return how.c * shape.params + (copies - 1) * how.c * shape.text.params
    return how.c * (min(copies, 2) * shape.root + copies * shape.text.params)


def load(shape: ModelShape, how: Handling) -> int:
    """Rank 0 while it reads: the whole model and its shard.

    A tensor is copied before it is put in its place. Tied embeddings, the largest, come first, when the rest
    of the shard has no memory yet; else the head comes last. Not counted are pages of files whose numbers
    are of another type than the weights, which the kernel gives up first.
    """
    filled, copied = weights(shape, how), shape.largest_stored // how.ranks
    return shape.stored + (max(filled, 2 * copied) if shape.is_tied else filled + copied)


def chunk(shape: ModelShape, how: Handling, line: Line) -> int:
    """Logits held at once, with what a softmax of a part of them takes."""
    number = how.c if how.device == "cpu" else 4
    rows = min(line.responses, max(1, CHUNK_BYTES[how.device] // (number * shape.vocab)))
    logits = number * rows * shape.vocab
    return logits + min(4 * 4 * rows * shape.vocab, BLOCK_BYTES[how.device])


def kept(shape: ModelShape, how: Handling, line: Line) -> int:
    """Activations that wait for the backward pass when the forward pass is done, the head's left out."""
    per_token = how.c * shape.text.hidden if how.checkpointing else shape.text.saved(how.c)
    total = shape.text.layers * per_token * line.tokens
    if shape.tower is not None:
        per_patch = how.c * shape.tower.hidden if how.checkpointing else shape.tower.saved(how.c)
        total += shape.tower.layers * per_patch * line.patches
    last_norm = (NORM_BYTES + 2 * how.c) * shape.text.hidden * line.tokens
    return total + last_norm + how.c * shape.text.hidden * line.responses


def log_prob_pass(shape: ModelShape, how: Handling, line: Line) -> int:
    """The most that a pass without gradients takes beside the weights at rest."""
    in_layer = shape.text.passing(how.c) * line.tokens
    if shape.tower is not None:
        in_layer = max(in_layer, shape.tower.passing(how.c) * line.patches)
    in_head = how.c * shape.text.hidden * (line.tokens + line.responses) + chunk(shape, how, line)
    layer = how.c * shape.text.params * (1 if how.ranks == 1 else 3)
    return gathered(shape, how) - layer + max(in_layer + layer, in_head)


def update_pass(shape: ModelShape, how: Handling, line: Line) -> int:
    """The most that a forward and backward pass takes beside weights, gradients and optimizer at rest."""
    before = how.c * shape.root + kept(shape, how, line)
    return max(
        before + _head_backward(shape, how, line),
        before + _layer_backward(shape, how, line),
        _root_backward(shape, how),
    )


def _head_backward(shape: ModelShape, how: Handling, line: Line) -> int:
    """Logits again, the head's gradient summed over chunks, and that of the hidden states."""
    number = how.c if how.device == "cpu" else 4
    single = line.responses * number * shape.vocab <= CHUNK_BYTES[how.device]
    rows = min(PRODUCT_ROWS, shape.vocab)
    head = shape.learning_head
    summed = how.c * head if single or not head else 4 * head + how.c * rows * shape.text.hidden
    return chunk(shape, how, line) + summed + how.c * shape.text.hidden * line.responses


def _layer_backward(shape: ModelShape, how: Handling, line: Line) -> int:
    """A layer of the backward pass, with what FSDP holds for it, behind the head's gradient."""
    text, ranks = shape.text, how.ranks
    again = text.saved(how.c) if how.checkpointing else 0
    tokens = (again + text.gradients(how.c)) * line.tokens
    if shape.tower is not None:
        again = shape.tower.saved(how.c) if how.checkpointing else 0
        tokens = max(tokens, (again + shape.tower.gradients(how.c)) * line.patches)
    fetched = 1 if ranks == 1 else 2  # this layer's weights, and the next one's on their way
    weights = fetched * how.c * text.params
    learning = text.params * shape.learning // shape.params
    gradients = (how.c + how.r) * learning  # of this layer, and those of the one before being sent
    received = int(how.r * (1 + 1 / ranks) * learning)
    return how.c * shape.learning_head + max(tokens + weights + gradients, received)


def _root_backward(shape: ModelShape, how: Handling) -> int:
    """The embeddings' gradient joins the head's, and both are summed over the ranks."""
    root, head = shape.learning_root, shape.learning_head if shape.is_tied else 0
    joined = how.c * (shape.root + root + head)  # weights, their gradients, and the head's apart
    sent = how.c * shape.root + how.r * root
    copies = 2 if how.device == "cpu" and how.ranks > 1 else 1  # gloo sends a copy
    received = int(how.r * root * (copies + 1 / how.ranks))
    return max(joined, sent, received)


def cache_bytes_per_token(text: Stack, number: int) -> int:
    """Keys and values of a token in all layers."""
    return 2 * text.layers * text.kv_heads * text.head_dim * number
