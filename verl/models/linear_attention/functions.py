# SPDX-License-Identifier: Apache-2.0
"""The two functions through which tokens of a linear attention layer meet, for packed tokens.

Both take a model's own function for padded rows, and the layout of the packed tokens. Without a layout they
call the model's own function.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed.device import has_kernels
from verl.distributed.ulysses import gather_rows, heads_to_tokens, share_heads
from verl.models.attention.kernels import HALF_TYPES
from verl.models.attention.layouts import Layout
from verl.models.linear_attention.recurrence import PaddedPlan, VarlenPlan
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

# Kernels of flash-linear-attention with `cu_seqlens`, by the functions of transformers that they replace.
FLA_KERNELS = {
    "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "chunk_kimi_delta_attention": ("fla.ops.kda", "chunk_kda"),
}
RULE_OPTIONS = ("use_qk_l2norm_in_kernel",)

Rule = Callable[..., tuple[Tensor, Tensor | None]]


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
        own = partial(inspect.unwrap(function), **options)  # rather than a package's, which needs a GPU
        out = _padded_rows(own, parts, recurrence.padded_plan)
    else:
        out = _varlen_rows(partial(kernel, **options), parts, recurrence.varlen_plan)
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


@cache
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
