# SPDX-License-Identifier: Apache-2.0
"""Layers with a state of any kind, such as Mamba's, which run whole rows.

Nothing is known of such a layer but that a token depends on earlier ones only. Its own forward gets rows that
are padded on the right, each response behind a copy of its prompt. That is exact, and takes as much time and
memory as without shared prompts. Sequence-parallel ranks run all rows each.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed.ulysses import gather_rows
from verl.models.attention.block_inputs import running_block
from verl.models.attention.layouts import Layout
from verl.models.linear_attention.layers import is_linear_layer
from verl.models.linear_attention.recurrence import Recurrence

STATE_TYPES = frozenset({"linear_attention", "conv", "hybrid"})  # transformers' names of layers with a state
CACHES = frozenset({"past_key_values", "cache_params"})


def row_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules that keep a state in a cache, but are neither attention nor delta rules."""
    for module in model.modules():
        within = (child for child in module.modules() if child is not module)
        if _takes_cache(module) and not any(map(_takes_cache, within)):
            forward = inspect.unwrap(type(module).forward)
            is_attention = "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names
            if not is_attention and not is_linear_layer(module):
                yield module


def run_whole_rows(model: nn.Module) -> None:
    """Let the layers with a state run the rows of a packed sequence; otherwise they compute as before."""
    for layer in list(row_layers(model)):
        # A subclass rather than a closure: copies of the model must run their own forward.
        original = type(layer)
        forward = functools.wraps(original.forward)(_forward(original.forward))
        changed = {"forward": forward, "__module__": original.__module__}
        layer.__class__ = type(original.__name__, (original,), changed)


def _takes_cache(module: nn.Module) -> bool:
    return not CACHES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: nn.Module,
        hidden_states: Tensor,  # (1, n, C)
        *args: Any,
        packed_layout: Layout | None = None,
        **kwargs: Any,
    ) -> Any:
        block = running_block()
        layout = packed_layout if block is None else block.layout
        if layout is None:
            return original(self, hidden_states, *args, **kwargs)
        recurrence, local = layout.recurrence, hidden_states.shape[1]
        rows = recurrence.whole_rows
        # Gathered once, however many batches there are.
        take = _selector((hidden_states, *args), recurrence, local)
        options = {name: _selector(value, recurrence, local) for name, value in kwargs.items()}
        outs, others = [], 0
        for positions in rows.batches:
            own = {name: select(positions) for name, select in options.items()}
            out = original(self, *take(positions), **own)
            if isinstance(out, tuple):
                out, others = out[0], len(out) - 1
            outs.append(out.flatten(0, 1))
        out = torch.cat(outs)[rows.order]  # (N, C)
        sp = recurrence.sp
        padded = nn.functional.pad(out, (0, 0, 0, local * sp.ulysses_size - len(out)))
        own_tokens = padded[sp.ulysses_index * local :][None, :local]
        return (own_tokens, *[None] * others) if others else own_tokens

    return forward


def _selector(value: Any, recurrence: Recurrence, local: int) -> Callable[[Tensor], Any]:
    """Return a function of positions (rows, L) that gives a layer the rows (rows, L, ...) of (1, n, ...)."""
    if isinstance(value, tuple):
        parts = [_selector(part, recurrence, local) for part in value]
        return lambda positions: tuple(part(positions) for part in parts)
    if not torch.is_tensor(value) or value.shape[:2] != (1, local):
        return lambda _: value
    sp = recurrence.sp
    tokens = gather_rows(value[0], (local,) * sp.ulysses_size, sp, sum_gradients=True)[: recurrence.length]
    padded = torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])])
    return lambda positions: padded[positions]
