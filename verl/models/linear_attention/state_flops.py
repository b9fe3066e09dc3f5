# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of layers with a state, which a token reads and changes once.

Each takes as many as the recurrence, whatever a kernel computes instead for a chunk of tokens. Of the state's
values for each head, 2 operations for a product with a vector, and 2 for adding an outer product:

    delta rule    S = a S (I - b k k') + b v k',  o = S q      6: S k, the outer product, S q
    Mamba         S = a S + x B',                 y = S C      4: the outer product, S C
    lightning     S = a S + k v',                 o = S'q      4: the outer product, S'q

The decay `a` and other elementwise steps do not count, as the softmax of attention does not.

Sources: "Gated Delta Networks", equation 10 (https://arxiv.org/abs/2412.06464), of which "Kimi Linear",
equation 1 (https://arxiv.org/abs/2510.26692), decays channels apart; "Mamba", equation 2
(https://arxiv.org/abs/2312.00752); "Lightning Attention-2", section 3.1 (https://arxiv.org/abs/2401.04658).
"""

import inspect
import math
from types import FunctionType
from typing import NamedTuple

from torch import nn

ATTENTION = "ALL_ATTENTION_FUNCTIONS"  # transformers' name for its attention functions


class StateKind(NamedTuple):
    """Layers with a state, known by their attributes; those in `sizes` give its number of values."""

    sizes: tuple[str, ...]
    operations: int  # for each value and token
    marks: tuple[str, ...] = ()  # further attributes


STATES = (
    StateKind(("num_v_heads", "head_v_dim", "head_k_dim"), 6),  # gated delta rule
    StateKind(("num_heads", "head_dim", "head_dim"), 6, ("forget_gate",)),  # Kimi delta attention
    StateKind(("intermediate_size", "ssm_state_size"), 4),  # Mamba, Mamba-2
    StateKind(("num_attention_heads", "head_dim", "head_dim"), 4, ("slope_rate",)),  # lightning attention
)


def state_operations(model: nn.Module) -> int:
    """Count the operations of a token in the recurrences of all layers with a state."""
    return sum(map(_of_module, model.modules()))


def attending_layers(decoder: nn.Module, num_layers: int) -> list[bool]:
    """Return for each layer of a decoder if its tokens attend to each other.

    All do in models that compute attention in a way of their own.
    """
    found = [any(map(_attends, layer.modules())) for layer in getattr(decoder, "layers", ())]
    return found if len(found) == num_layers and any(found) else [True] * num_layers


def _of_module(module: nn.Module) -> int:
    for sizes, operations, marks in STATES:
        if all(hasattr(module, name) for name in (*sizes, *marks)):
            return operations * math.prod(getattr(module, name) for name in sizes)
    return 0


def _attends(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, FunctionType) and ATTENTION in forward.__code__.co_names
