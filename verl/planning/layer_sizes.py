# SPDX-License-Identifier: Apache-2.0
"""Sizes of a transformer's layers, and bytes that their activations take: formulas alone, without torch.

Letters: `H` hidden size, `A` heads x head size, `I` intermediate size, `c` bytes of a number in forward and
backward.
"""

import math
from dataclasses import dataclass

NORM_BYTES = 4  # norms compute in float32 and keep their input that way
TILE = 1 << 13  # tokens of an MLP's tile, see `models/tiled_mlp.py`


@dataclass(frozen=True)
class LayerCache:
    """Numbers that a rollout engine keeps of a sequence in layers of one kind."""

    numbers: int  # of a token
    heads: int = 1  # that an engine's ranks divide among them; each rank keeps a latent whole
    window: float = math.inf  # the last tokens that are kept
    state: int = 0  # of a sequence of any length
    float32_state: int = 0  # the same, in float32 whatever the engine's type is


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention, which makes queries, keys and values of all heads from short vectors."""

    queries: int  # of the vector that queries are made from; 0: they are made from states
    keys: int  # of that of keys and values
    rotary: int  # dimensions of a key that all heads share
    value_dim: int  # of a head


@dataclass(frozen=True)
class Stack:
    """Identical transformer layers: those of the language model, or of the vision tower."""

    layers: int
    hidden: int
    intermediate: int  # that a token runs through; in a mixture, the sum over its experts
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    params: int  # of the largest layer
    has_head_norms: bool = False  # of queries and keys
    adapted_experts: int = 0  # weights of a layer's joint experts with adapters: each pass makes their sum
    is_tiled: bool = False  # MLPs run in tiles
    experts: int = 0  # weights of a layer's joint experts
    choices: int = 0  # experts that a token runs through
    caches: tuple[LayerCache, ...] = ()  # of all layers, by kind
    latent: Latent | None = None
    undivided: int = 0  # weights without experts of the layer that has most of them

    @property
    def keys_and_values(self) -> int:
        """Numbers of a token in all layers, if each keeps them.

        Of latent attention they are what an engine on CPU gets room for.
        """
        dim = self.head_dim if self.latent is None else self.latent.rotary
        return 2 * self.layers * self.kv_heads * dim

    def cached(self, c: int, tokens: float, ranks: int = 1) -> float:
        """Bytes that one of an engine's ranks keeps of a sequence."""
        return sum(
            (c * (cache.numbers * min(tokens, cache.window) + cache.state) + 4 * cache.float32_state)
            / min(ranks, cache.heads)
            for cache in self.caches
        )

    def saved(self, c: int) -> int:
        """Bytes of a token that a layer saves for its backward pass.

        norms 2 (4 H + 2 c H)     queries, keys, values, output 4 c A     gated product 4 c I
        """
        return self.saved_by_attention(c) + 4 * c * self.intermediate

    def saved_by_attention(self, c: int) -> int:
        """The same without the MLP's; of latent attention, what keys and values are parts of."""
        attention = self.heads * self.head_dim
        norms = 2 * (NORM_BYTES + 2 * c) * self.hidden
        if self.has_head_norms:
            norms += (NORM_BYTES + c) * (attention + self.kv_heads * self.head_dim)
        if self.latent is None:
            return norms + 4 * c * attention
        norms += (NORM_BYTES + 2 * c) * (self.latent.queries + self.latent.keys)
        return norms + c * (2 * attention + self.expanded + self.heads * self.latent.value_dim)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def expanded(self) -> int:
        """Numbers of a token that latent attention makes keys and values of."""
        rotary = 0 if self.latent is None else self.latent.rotary
        return self.heads * (self.head_dim - rotary + self.value_dim)

    def latent_backward(self, c: int, tokens: int) -> int:
        """Bytes of latent attention's gradients: their sums in float32, and a call's, with wide values."""
        if self.latent is None:
            return 0
        return self.heads * (4 * (2 * self.head_dim + self.value_dim) + 6 * c * self.head_dim) * tokens

    def recomputed(self, share: float) -> int:
        """Layers whose activations are recomputed."""
        return math.ceil(share * self.layers)

    def kept(self, c: int, share: float) -> int:
        """Bytes of a token that all layers save: of a recomputed one its input."""
        again = self.recomputed(share)
        return again * c * self.hidden + (self.layers - again) * self.saved(c)

    def transient(self, c: int, tokens: int) -> int:
        """Bytes in a layer that saves nothing: its states and the widest operation."""
        attention = self.heads * self.head_dim
        product = 3 * c * self.intermediate * tokens
        if self.tiles(tokens):  # the output of all tiles, apart and joined
            product = 3 * c * self.intermediate * TILE + 2 * c * self.hidden * tokens
        # Of latent attention: queries before and after their rotation and in order, keys, wide values and
        # their result, and what keys and values are parts of.
        numbers = 5 * attention if self.latent is None else 6 * attention + self.expanded
        widest = max(product, 2 * NORM_BYTES * self.hidden * tokens, numbers * c * tokens)
        return 2 * c * self.hidden * tokens + widest

    def backward(self, c: int, tokens: int, *, recomputes: bool) -> int:
        """Bytes that the backward pass of a layer takes, with what it recomputes."""
        saved = self.saved(c) if recomputes else 0
        norms, product = 2 * NORM_BYTES * self.hidden * tokens, 2 * c * self.intermediate * tokens
        if self.tiles(tokens):
            saved -= 4 * c * self.intermediate
            product = 6 * c * self.intermediate * TILE + c * self.hidden * tokens
        attention = self.latent_backward(c, tokens) - 4 * c * self.intermediate * tokens  # which are freed
        return (saved + c * self.hidden) * tokens + max(product, norms, attention)

    def held(self, expert_ranks: int) -> int:
        """Weights of a layer on a rank that has gathered them, with its part of divided experts."""
        return self.params - self.experts + self.experts // expert_ranks

    def arrived(self, c: int, tokens: int, expert_ranks: int) -> int:
        """Bytes of states that came to this rank's experts: as many as its own tokens have, if even."""
        return 0 if expert_ranks == 1 else c * self.choices * self.hidden * tokens

    def tiles(self, tokens: int) -> bool:
        """Return whether these tokens exceed a tile of the MLP."""
        return self.is_tiled and tokens > TILE
