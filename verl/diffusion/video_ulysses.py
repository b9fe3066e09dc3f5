# SPDX-License-Identifier: Apache-2.0
"""Ulysses over the tokens of a video (https://arxiv.org/abs/2309.14509).

The ranks of a group have the same rows. From the first block to the last layer each holds some tokens with
all heads, and during self-attention all tokens with some heads. Every layer works on single tokens otherwise,
and attention to the prompt on single tokens and the whole prompt. All ranks get the whole result, and compute
the same loss from it; the gradient of a rank is that of its own tokens, so that the sum over ranks is exact.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.ulysses import gather_rows, heads_to_tokens, share_heads


@dataclass(frozen=True)
class TokenLayers:
    """Names of the layers between which tokens are divided; those of attention are in every block."""

    first: str  # its first argument has all tokens, (B, N, C)
    last: str  # its result has a value for each token, (B, N, C)
    attention: str  # module of self-attention in a block, with the attribute `heads`
    # Its layers whose results are attended to, (B, N, heads x D); `heads` is read afterwards.
    projected: tuple[str, ...]
    out: str  # its layer that reads what was attended to, (B, N, heads x D)


class VideoUlysses:
    """Divides the tokens of a transformer over the ranks of a group, with hooks; after adapters are attached.

    Raises:
        ValueError: The heads cannot be divided.
    """

    def __init__(self, model: nn.Module, layers: TokenLayers, sp: SequenceParallel) -> None:
        self.sp, self.num_tokens = sp, 0
        model.get_submodule(layers.first).register_forward_pre_hook(self._divide)
        model.get_submodule(layers.last).register_forward_hook(self._join)
        attentions = [
            module for name, module in model.named_modules() if name.endswith(f".{layers.attention}")
        ]
        for attention in attentions:
            self._attend(attention, layers)

    def _attend(self, attention: Any, layers: TokenLayers) -> None:
        if attention.heads % self.sp.ulysses_size:
            raise ValueError(
                f"`worker.actor.ulysses_size` ({self.sp.ulysses_size}) must divide the {attention.heads}"
                " attention heads of the transformer"
            )
        heads, attention.heads = attention.heads, attention.heads // self.sp.ulysses_size
        for name in layers.projected:
            attention.get_submodule(name).register_forward_hook(
                lambda module, given, found: self._tokens_to_heads(found, heads)
            )
        own = attention.heads
        attention.get_submodule(layers.out).register_forward_pre_hook(
            lambda module, given: (self._heads_to_tokens(given[0], own), *given[1:])
        )

    def _divide(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *others = given
        self.num_tokens = tokens.shape[1]
        padded = F.pad(tokens, (0, 0, 0, self._missing))
        return padded.chunk(self.sp.size, 1)[self.sp.index], *others  # (B, n, C)

    def _join(self, module: nn.Module, given: tuple[Any, ...], found: Tensor) -> Tensor:
        counts = [found.shape[1]] * self.sp.size
        joined = gather_rows(found.transpose(0, 1).contiguous(), counts, self.sp)  # (n * u, B, C)
        return joined[: self.num_tokens].transpose(0, 1)

    def _tokens_to_heads(self, values: Tensor, heads: int) -> Tensor:
        by_head = values.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # (n, H, B, D)
        (shared,) = share_heads([by_head], self.sp)  # (n * u, H / u, B, D)
        return shared[: self.num_tokens].permute(2, 0, 1, 3).flatten(2)  # (B, N, H / u x D)

    def _heads_to_tokens(self, values: Tensor, heads: int) -> Tensor:
        padded = F.pad(values.unflatten(-1, (heads, -1)), (0, 0, 0, 0, 0, self._missing))
        by_head = padded.permute(1, 2, 0, 3)  # (n * u, H / u, B, D)
        own = heads_to_tokens(by_head.flatten(2)[None], self.sp)[0]  # (n, H, B x D)
        return own.unflatten(-1, by_head.shape[2:]).permute(2, 0, 1, 3).flatten(2)  # (B, n, H x D)

    @property
    def _missing(self) -> int:
        """Tokens that complete those of the last rank."""
        return -self.num_tokens % self.sp.size
