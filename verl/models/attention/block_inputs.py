# SPDX-License-Identifier: Apache-2.0
"""Inputs of the block that is running, for attention modules that do not get them all.

Some models' blocks do not pass keyword arguments on to their attention, and some attention computes with the
index of a token in the sequence, which in a packed sequence is not its position. Hooks on the blocks run in
forward and when checkpointing runs a block again.
"""

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.models.attention.layouts import Layout


class BlockInputs(NamedTuple):
    """Arguments of a block in a packed forward pass."""

    layout: Layout
    position_ids: Tensor | None  # (1, N)


_running: ContextVar[BlockInputs | None] = ContextVar("block_inputs", default=None)


def running_block() -> BlockInputs | None:
    """Return the inputs of the block that runs in this thread; None outside of packed blocks."""
    return _running.get()


def record_block_inputs(model: nn.Module) -> None:
    """Make the inputs of the model's blocks available to their attention."""
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block.register_forward_pre_hook(_enter, with_kwargs=True)
            block.register_forward_hook(_leave, with_kwargs=True, always_call=True)


def _enter(_block: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    layout = kwargs.get("packed_layout")
    if layout is not None:
        _running.set(BlockInputs(layout, kwargs.get("position_ids")))


def _leave(_block: nn.Module, _args: tuple, kwargs: dict[str, Any], _out: Any) -> None:
    if "packed_layout" in kwargs:
        _running.set(None)


def at_positions(query: Tensor, module: Any) -> Tensor:
    """Scale queries (1, H, N, D) by their position where the model scaled them by their index.

    Llama 4's layers without rotary positions multiply queries by

        log(1 + floor((index + 1) / floor_scale)) x attn_scale + 1
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    block = running_block()
    if block is None or block.position_ids is None:
        raise NotImplementedError(
            f"{type(module).__name__} scales queries by their position, which its block does not get"
        )
    index = torch.arange(query.shape[2], device=query.device)
    right, applied = (_temperature(positions, module) for positions in (block.position_ids[0], index))
    return query * (right / applied).to(query.dtype)[:, None]


def _temperature(positions: Tensor, module: Any) -> Tensor:
    steps = torch.floor((positions.float() + 1) / module.floor_scale)
    return torch.log1p(steps) * module.attn_scale + 1
