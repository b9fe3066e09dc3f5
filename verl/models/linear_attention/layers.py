# SPDX-License-Identifier: Apache-2.0
"""Layers with a state of transformers models, changed to run packed tokens.

The forward of a linear attention layer projects, normalizes and gates tokens one by one. It calls two
functions of its module in which tokens meet, a causal convolution and a delta rule; these are replaced, by
the names in its code. The replacements run the model's own functions, or kernels, over each segment of the
packed tokens. So every model whose layers are written this way works, whatever projections they have.

Of other layers with a state, such as Mamba's, nothing is known but that a token depends on earlier ones only.
Their own forward gets whole rows that are padded on the right, each response behind a copy of its prompt.
That is exact, and takes as much time and memory as without shared prompts. Sequence-parallel ranks run all
rows each.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed.device import has_kernels
from verl.distributed.ulysses import gather_rows, heads_to_tokens, share_heads
from verl.models.attention.interface import calls_attention, running_block
from verl.models.attention.kernels import HALF_TYPES
from verl.models.attention.layouts import Layout
from verl.models.linear_attention.recurrence import PaddedPlan, Recurrence, VarlenPlan
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

# Kernels of flash-linear-attention with `cu_seqlens`, by the functions of transformers that they replace.
FLA_KERNELS = {
    "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "chunk_kimi_delta_attention": ("fla.ops.kda", "chunk_kda"),
}
RULE_OPTIONS = ("use_qk_l2norm_in_kernel",)
CONVOLUTION = "causal_conv1d_fn"
STATE_TYPES = frozenset({"linear_attention", "conv", "hybrid"})  # transformers' names of layers with a state
CACHES = frozenset({"past_key_values", "cache_params"})

Rule = Callable[..., tuple[Tensor, Tensor | None]]


def linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a gated delta rule behind a causal convolution."""
    return (module for module in model.modules() if _rule_of(type(module)) is not None)


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
        if is_innermost and not calls_attention(module) and _rule_of(type(module)) is None:
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


@torch.compiler.disable  # a compiled block would be compiled again for each layout
def packed_convolution(
    function: Callable[..., Tensor],
    hidden: Tensor,  # (1, C, n)
    weight: Tensor,  # (C, width)
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    packed_layout: Layout | None = None,
    **options: Any,
) -> Tensor:
    """Convolve each segment of packed tokens, behind the inputs before it: (1, C, n).

    A row starts behind zeros, as a padded one does, and a response behind the end of its prompt. So any
    function for unpacked rows computes all segments in one call.
    """
    if packed_layout is None:
        return function(hidden, weight, bias, activation=activation, **options)
    own = function if has_kernels(hidden.device) else inspect.unwrap(function)  # packages' kernels need a GPU
    recurrence = packed_layout.recurrence
    window = recurrence.window(weight.shape[-1])
    tokens = hidden[0].transpose(0, 1)  # (n, C)
    parts = [tokens.new_zeros(1, tokens.shape[1]), tokens]
    if window.counts:
        parts.append(gather_rows(tokens[window.lent], window.counts, recurrence.sp, sum_gradients=True))
    rows = torch.cat(parts)[window.tokens]  # (M, C)
    out = own(rows.transpose(0, 1)[None], weight, bias, activation=activation)
    return out[:, :, window.kept]


@torch.compiler.disable
def packed_delta_rule(
    function: Rule,
    query: Tensor,  # (1, n, H, D)
    key: Tensor,
    value: Tensor,  # (1, n, H, Dv)
    *,
    g: Tensor,  # (1, n, H) or (1, n, H, D)
    beta: Tensor,  # (1, n, H)
    packed_layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule over each segment of packed tokens: (1, n, H, Dv), and None."""
    if packed_layout is None:
        return function(query, key, value, g=g, beta=beta, **options)
    recurrence = packed_layout.recurrence
    parts = share_heads([tensor[0] for tensor in (query, key, value, g, beta)], recurrence.sp)
    local, length = len(parts[0]), recurrence.length
    parts = [part[:length] for part in parts]  # padding is at the end
    options = {name: value for name, value in options.items() if name in RULE_OPTIONS}
    kernel = _varlen_kernel(function, query)
    if kernel is None:
        # A package's own kernel needs a GPU.
        own = functools.partial(inspect.unwrap(function), **options)
        out = _padded_rows(own, parts, recurrence.padded_plan)
    else:
        out = _varlen_rows(functools.partial(kernel, **options), parts, recurrence.varlen_plan)
    out = nn.functional.pad(out, (0, 0, 0, 0, 0, local - length))
    return heads_to_tokens(out[None], recurrence.sp), None


def _padded_rows(rule: Rule, tensors: list[Tensor], plan: PaddedPlan) -> Tensor:
    """Compute batches of rows that are padded by tokens which change no state."""
    padded = [torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]) for tensor in tensors]
    outs: list[Tensor] = []
    states: list[Tensor] = []
    for wave in plan.waves:
        sizes = [len(tokens) for tokens in wave.batches]
        initial = None if wave.parents is None else torch.cat(states)[wave.parents].split(sizes)
        states = []
        for number, tokens in enumerate(wave.batches):
            query, key, value, g, beta = (tensor[tokens] for tensor in padded)
            first = None if initial is None else initial[number]
            out, last = rule(
                query, key, value, g=g, beta=beta, initial_state=first,
                output_final_state=wave is not plan.waves[-1],
            )  # fmt: skip
            outs.append(out.flatten(0, 1))
            if last is not None:
                states.append(last)
    return torch.cat(outs)[plan.order]


def _varlen_rows(kernel: Rule, tensors: list[Tensor], plan: VarlenPlan) -> Tensor:
    outs: list[Tensor] = []
    states = None
    for wave in plan.waves:
        own = tensors if wave.tokens is None else [tensor[wave.tokens] for tensor in tensors]
        query, key, value, g, beta = (tensor[None] for tensor in own)
        out, states = kernel(
            *(query, key, value),
            g=g,
            beta=beta,
            initial_state=None if wave.parents is None or states is None else states[wave.parents],
            output_final_state=wave is not plan.waves[-1],
            cu_seqlens=wave.cu_seqlens,
            cu_seqlens_cpu=wave.cu_seqlens_cpu,
        )
        outs.append(out[0])
    return outs[0] if plan.order is None else torch.cat(outs)[plan.order]


def _varlen_kernel(function: Rule, query: Tensor) -> Rule | None:
    """Return the kernel of flash-linear-attention for such tensors, if it is installed."""
    # It refuses float32.
    if not has_kernels(query.device) or query.dtype not in HALF_TYPES:
        return None
    return _fla_kernel(function.__name__)


@functools.cache
def _fla_kernel(name: str) -> Rule | None:
    if importlib.util.find_spec("fla") is None:
        logger.warning(
            "%s runs in plain torch, which is slower by an order of magnitude: pip install"
            " flash-linear-attention",
            name,
        )
        return None
    module, attribute = FLA_KERNELS[name]
    kernel = getattr(importlib.import_module(module), attribute)
    if "cu_seqlens_cpu" in inspect.signature(kernel).parameters:
        return kernel

    def reading_back(*args: Any, cu_seqlens_cpu: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return kernel(*args, **options)

    return reading_back  # an older version reads the boundaries back from the device
