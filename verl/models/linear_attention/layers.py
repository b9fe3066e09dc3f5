# SPDX-License-Identifier: Apache-2.0
"""Linear attention layers of transformers models, changed to run packed tokens.

A layer's own forward projects, normalizes and gates tokens one by one. It calls two functions of its module
in which tokens meet, a causal convolution and a delta rule; these are replaced, by the names in its code. So
every model whose layers are written this way works, whatever projections they have.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

from verl.models.linear_attention.functions import FLA_KERNELS, packed_convolution, packed_delta_rule

CONVOLUTION = "causal_conv1d_fn"


def linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a gated delta rule behind a causal convolution."""
    return filter(is_linear_layer, model.modules())


def is_linear_layer(module: nn.Module) -> bool:
    return _rule_of(type(module)) is not None


def pack_linear_layers(model: nn.Module) -> None:
    """Let the linear attention layers read `packed_layout`; without it they compute what they did before."""
    for layer in linear_layers(model):
        # A subclass rather than a closure: copies of the model must run their own forward.
        original = type(layer)
        layer.__class__ = type(
            original.__name__, (original,), {"forward": _packed(original), "__module__": original.__module__}
        )


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
