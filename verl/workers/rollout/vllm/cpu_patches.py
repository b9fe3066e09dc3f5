# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM on CPU; three keep weights in the layout that `load_weights` reads and writes."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.workers.rollout.vllm.drafts import expand_to_tokens
from verl.workers.rollout.vllm.image_blocks import with_image_rows
from verl.workers.rollout.vllm.patches import replaceable, wrap

SHARED_MEMORY = Path("/dev/shm")
EXPERT_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


def apply_cpu_patches() -> None:
    """Apply all patches for CPUs, before an engine is built; safe to call again."""
    keep_linear_weights()
    read_plain_convolution_weights()
    keep_expert_weights()
    name_shared_memory_per_run()
    skip_token_ranks()
    see_images_whole()
    find_kernels_despite_numba()
    sample_from_drafts()


def skip_token_ranks() -> None:
    """Stop vLLM from ranking each sampled token, which is unused."""
    # 4 % of the time on CPU with a vocabulary of 32,000
    sampler = replaceable("vllm.v1.sample.sampler", "batched_count_greater_than")
    sampler.batched_count_greater_than = lambda values, sampled: torch.zeros(len(values), dtype=torch.int64)


def see_images_whole() -> None:
    """Let tokens of an image attend to its later ones (Gemma 3), which vLLM does on GPUs only."""
    # log-probs of tiny models would differ from the trainer's by 0.1
    wrap("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder", "build", _build_with_images)


def _build_with_images(
    theirs: Callable[..., Any],
    self: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    **options: Any,
) -> Any:
    return theirs(self, common_prefix_len, with_image_rows(self, common_attn_metadata), **options)


def find_kernels_despite_numba() -> None:
    """Let vLLM on CPU replace its Triton kernels after numba, which finds drafts, was imported."""
    # vLLM 0.32 reads the attributes of every module, and llvmlite has an object that invents attributes
    wrap("vllm.triton_utils.dispatcher", "_rebind_kernels", _without_llvmlite)


def _without_llvmlite(theirs: Callable[..., None], *arguments: Any) -> None:
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite.")}
    try:
        theirs(*arguments)
    finally:
        sys.modules.update(hidden)


def sample_from_drafts() -> None:
    """Give each token of a draft the temperature, top-p and top-k of its request, and allow no drafts."""
    # vLLM 0.32's kernel for CPUs writes into a copy and rounds to integers: drafts are accepted by logits
    # divided by whatever the memory held. Its top-k fails on steps in which no request has a draft.
    module = "vllm.v1.sample.rejection_sampler"
    replaceable(module, "expand_batch_to_tokens").expand_batch_to_tokens = expand_to_tokens
    wrap(module, "apply_sampling_constraints", _constrain_if_any)


def _constrain_if_any(theirs: Callable[..., Tensor], logits: Tensor, *arguments: Any) -> Tensor:
    return theirs(logits, *arguments) if len(logits) else logits


def name_shared_memory_per_run() -> None:
    """Name vLLM's files in /dev/shm (tensor parallelism on CPU) by run, and unlink them once mapped."""
    # all runs would share the names of files that are left behind: the next run fails with "create shm in
    # SHMManager failed. errno: 17"
    communicator = "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed"
    wrap(communicator, "make_group_name", _run_group_name)
    wrap(communicator, "_init_cpu_shm", _init_and_unlink)


def _run_group_name(theirs: Callable[[Any], str], communicator: Any) -> str:
    return f"verl-{os.environ['MASTER_PORT']}-{theirs(communicator)}".replace("/", "")


def _init_and_unlink(theirs: Callable[[Any], int], self: Any) -> int:
    if self.communicator.rank == 0:
        unlink_shared_memory(self.group_name)
    torch.distributed.barrier(self.communicator.device_group)
    handle = theirs(self)  # ends with a barrier
    if self.communicator.rank == 0:
        unlink_shared_memory(self.group_name)
    return handle


def unlink_shared_memory(group_name: str) -> None:
    """Remove the files of a group; mapped memory stays."""
    for path in SHARED_MEMORY.iterdir():
        if path.name.startswith(f"{group_name}_"):
            path.unlink(missing_ok=True)


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
    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        wrap("vllm._custom_ops", name, _convolve)


def _convolve(theirs: Callable[..., Tensor], *, weight: Tensor, **arguments: Any) -> Tensor:
    return theirs(weight=weight.flatten(1), **arguments | {"is_weight_packed": False})


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
    activate = EXPERT_ACTIVATIONS.get(activation.value)
    if activate is None or self.w1_bias is not None:
        raise NotImplementedError(f"experts on CPU with activation {activation.value!r} or a bias")
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        part = F.linear(activate(gate) * up, w2[expert]) * topk_weights[rows, slots, None].to(output.dtype)
        output.index_add_(0, rows, part)
