# SPDX-License-Identifier: Apache-2.0
"""Layers with a state of transformers models, changed to run packed tokens.

The forward of a linear attention layer projects, normalizes and gates tokens one by one. It calls two
functions of its module in which tokens meet, a causal convolution and a delta rule; these are replaced, by
the names in its code. So every model whose layers are written this way works, whatever projections they have.

Of other layers with a state, such as Mamba's, nothing is known but that a token depends on earlier ones only.
Their own forward gets whole rows that are padded on the right, each response behind a copy of its prompt.
That is exact, and takes as much time and memory as without shared prompts. Sequence-parallel ranks run all
rows each.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed.ulysses import gather_rows
from verl.models.attention.interface import calls_attention, running_block
from verl.models.attention.layouts import Layout
from verl.models.linear_attention.functions import FLA_KERNELS, packed_convolution, packed_delta_rule
from verl.models.linear_attention.recurrence import Recurrence

CONVOLUTION = "causal_conv1d_fn"
STATE_TYPES = frozenset({"linear_attention", "conv", "hybrid"})  # transformers' names of layers with a state
CACHES = frozenset({"past_key_values", "cache_params"})


def linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a gated delta rule behind a causal convolution."""
    return filter(is_linear_layer, model.modules())


def is_linear_layer(module: nn.Module) -> bool:
    return _rule_of(type(module)) is not None


def pack_linear_layers(model: nn.Module) -> None:
    """Let the linear attention layers read `packed_layout`; without it they compute what they did before."""
    for layer in linear_layers(model):
        _change_forward(layer, _packed(type(layer)))


def _rule_of(layer: type[nn.Module]) -> str | None:
    """Return the name of the delta rule that a layer's forward calls; None for any other layer."""
    forward = inspect.unwrap(layer.forward)
    called = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
    return next((name for name in FLA_KERNELS if name in called and CONVOLUTION in called), None)


def _packed(layer: type[nn.Module]) -> Callable[..., Any]:
    own = inspect.unwrap(layer.forward)
    rule = _rule_of(layer)
    assert isinstance(own, FunctionType) and rule is not None, "only linear layers are changed"
    replaced = {
        CONVOLUTION: functools.partial(packed_convolution, own.__globals__[CONVOLUTION]),
        rule: functools.partial(packed_delta_rule, own.__globals__[rule]),
    }
    packed = FunctionType(
        own.__code__, own.__globals__ | replaced, own.__name__, own.__defaults__, own.__closure__
    )
    packed.__kwdefaults__ = own.__kwdefaults__
    return functools.update_wrapper(packed, own, updated=())


def row_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules that keep a state in a cache, but are neither attention nor delta rules."""
    for module in model.modules():
        within = (child for child in module.modules() if child is not module)
        is_innermost = _takes_cache(module) and not any(map(_takes_cache, within))
        if is_innermost and not calls_attention(module) and not is_linear_layer(module):
            yield module


def run_whole_rows(model: nn.Module) -> None:
    """Let the layers with a state run the rows of a packed sequence; otherwise they compute as before."""
    for layer in list(row_layers(model)):
        own = type(layer).forward
        _change_forward(layer, functools.wraps(own)(_forward(own)))


def _change_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    # A subclass rather than a closure: copies of the model must run their own forward.
    original = type(layer)
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
