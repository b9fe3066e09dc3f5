# SPDX-License-Identifier: Apache-2.0
"""Run MLPs over a long sequence in tiles: the widest tensors of a layer exist for one tile only.

The TiledMLP of Arctic Long Sequence Training (Bekman et al. 2025, section 3.1), inside checkpointed blocks
and almost without a pass of its own: where the MLP ends its block, recomputing the block stops at the MLP's
input, and each tile then runs once more, right before its backward pass. Only the last product of a tile is
computed again for nothing.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PreTrainedModel

from verl.distributed.fsdp import fsdp_blocks

TILE = 1 << 13  # tokens


def tile_mlps(model: PreTrainedModel) -> None:
    """Let the dense MLPs of the model's blocks run in tiles; for models that recompute activations."""
    for mlp in dense_mlps(model):
        mlp.__class__ = _tiled(type(mlp))


def has_tiles(block: nn.Module) -> bool:
    """Return whether the block's MLP runs in tiles."""
    return issubclass(type(getattr(block, "mlp", None)), _InTiles)


def dense_mlps(model: PreTrainedModel) -> list[nn.Module]:
    """Return the MLPs of the model's blocks that compute the same of a token whatever the others are."""
    found = [getattr(block, "mlp", None) for block in fsdp_blocks(model)]
    return [mlp for mlp in found if isinstance(mlp, nn.Module) and _is_dense(mlp)]


def _is_dense(mlp: nn.Module) -> bool:
    if not type(mlp).__name__.lower().endswith("mlp") or hasattr(mlp, "experts"):
        return False
    return not any(isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules())


class _InTiles:
    """Marks the classes of MLPs that run in tiles."""


@functools.cache
def _tiled(original: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, hidden: Tensor, *others: Any) -> Tensor:
        tokens = hidden.flatten(0, -2)  # (N, H)
        if others or len(tokens) <= TILE:
            return original.forward(self, hidden, *others)
        run = functools.partial(original.forward, self)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        kept = _Kept.apply(tokens, torch.empty(0, requires_grad=True))
        return _Tiles.apply(tokens, [kept], run, *trained).view_as(hidden)

    return type(
        original.__name__, (_InTiles, original), {"forward": forward, "__module__": original.__module__}
    )


class _Kept(Function):
    """Keeps a tensor for the backward pass of another function."""

    # A function saves its tensors after its forward pass, and a checkpointed block is recomputed up to the
    # last saved one: here that comes before the tiles run.
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, _anchor: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return tokens.new_empty(0)


class _Tiles(Function):
    """Runs tiles without autograd; the backward pass runs each with it, and sums gradients in float32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, kept: list[Tensor], run: Any, *trained: Tensor) -> Tensor:
        [ctx.kept] = kept  # not an input; torch 2.11 frees what it saved as soon as the tensor is gone
        ctx.run, ctx.trained = run, trained
        return torch.cat([run(tile) for tile in tokens.split(TILE)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [tokens], trained, [gradient] = ctx.kept.grad_fn.saved_tensors, ctx.trained, gradients
        incoming = torch.empty_like(tokens)
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
        for into, tile, outgoing in zip(
            incoming.split(TILE), tokens.split(TILE), gradient.split(TILE), strict=True
        ):
            with torch.enable_grad():
                given = tile.detach().requires_grad_()
                output = ctx.run(given)
            mine, *others = torch.autograd.grad(output, (given, *trained), outgoing)
            into.copy_(mine)
            for total, other in zip(sums, others, strict=True):
                total += other
        summed = [total.to(parameter.dtype) for total, parameter in zip(sums, trained, strict=True)]
        return incoming, None, None, *summed
