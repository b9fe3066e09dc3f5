# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM on CPU that leave weights as `load_weights` reads and writes them."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.workers.rollout.vllm.patches import replaceable

EXPERT_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


def keep_linear_weights() -> None:
    """Stop vLLM on CPU from repacking linear weights for oneDNN, which empties `layer.weight`."""
    # `load_weights` fails on emptied parameters, and vLLM's `reload_weights` is silently wrong with tied
    # embeddings; throughput is the same. Delete this when vLLM loads into repacked weights.
    utils = replaceable("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")
    utils.dispatch_cpu_unquantized_gemm = _use_plain_linear


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


def read_plain_convolution_weights() -> None:
    """Tell convolutions of linear attention that `keep_linear_weights` kept their weights."""
    # They expect the repacked weights of CPUs with AVX512-BF16: log-probs are off by 5.
    ops: Any = importlib.import_module("vllm._custom_ops")
    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        function = getattr(ops, name, None)  # older versions have none
        if function is not None and getattr(function, "func", None) is not _convolve:
            setattr(ops, name, functools.partial(_convolve, function))


def _convolve(function: Callable[..., Tensor], *, weight: Tensor, **arguments: Any) -> Tensor:
    return function(weight=weight.flatten(1), **arguments | {"is_weight_packed": False})


def keep_expert_weights() -> None:
    """Stop vLLM on CPU from repacking experts' weights, which `load_weights` would overwrite."""
    # experts are computed one by one instead, slower than with vLLM's kernel
    experts = replaceable(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        "process_weights_after_loading",
        "apply",
    )
    experts.process_weights_after_loading = _keep_expert_weights
    experts.apply = _apply_experts


def _keep_expert_weights(self: Any, layer: torch.nn.Module) -> None:
    self._use_zentorch = False


def _apply_experts(
    self: Any,
    output: Tensor,  # (N, hidden)
    hidden_states: Tensor,  # (N, hidden)
    w1: Tensor,  # gate and up projections, (experts, 2 * intermediate, hidden)
    w2: Tensor,  # down projections, (experts, hidden, intermediate)
    topk_weights: Tensor,  # (N, k)
    topk_ids: Tensor,  # (N, k)
    activation: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write the weighted sum of the chosen experts' outputs."""
    activate = EXPERT_ACTIVATIONS.get(activation.value)
    if activate is None or self.w1_bias is not None:
        raise NotImplementedError(f"experts on CPU with activation {activation.value!r} or a bias")
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        part = F.linear(activate(gate) * up, w2[expert]) * topk_weights[rows, slots, None].to(output.dtype)
        output.index_add_(0, rows, part)
