# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM on CPU; three keep weights in the layout that `load_weights` reads and writes."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention.kernels import FULL, SLIDING
from verl.models.families.registry import family_of
from verl.workers.rollout.vllm.patches import replaceable, replacing, wrap, wrapping

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


@replacing("vllm.v1.sample.sampler", "batched_count_greater_than")
def skip_token_ranks(values: Tensor, sampled: Tensor) -> Tensor:
    """Stop vLLM from ranking each sampled token, which is unused."""
    # 4 % of the time on CPU with a vocabulary of 32,000
    return torch.zeros(len(values), dtype=torch.int64)


@wrapping("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder", "build")
def see_images_whole(
    theirs: Callable[..., Any], self: Any, common_prefix_len: int, common_attn_metadata: Any, **options: Any
) -> Any:
    """Let tokens of an image attend to its later ones (Gemma 3), which vLLM does on GPUs only."""
    # log-probs of tiny models would differ from the trainer's by 0.1
    return theirs(self, common_prefix_len, with_image_rows(self, common_attn_metadata), **options)


@wrapping("vllm.triton_utils.dispatcher", "_rebind_kernels")
def find_kernels_despite_numba(theirs: Callable[..., None], *arguments: Any) -> None:
    """Let vLLM on CPU replace its Triton kernels after numba, which finds drafts, was imported."""
    # vLLM 0.32 reads the attributes of every module, and llvmlite has an object that invents attributes
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


def expand_to_tokens(
    values: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat a value (B,) for each drafted token of its request, (num_tokens,).

    Args:
        cu_num_tokens: Sums of the requests' tokens, (B,).
        replace_from: Value that becomes `replace_to`, if these differ.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))  # (B,)
    if replace_from != replace_to:
        values = values.masked_fill(values == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


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


@replacing("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")
def keep_linear_weights(layer: Any, remove_weight: bool) -> None:
    """Stop vLLM on CPU from repacking linear weights for oneDNN, which empties `layer.weight`."""
    # `load_weights` fails on emptied parameters, and vLLM's `reload_weights` is silently wrong with tied
    # embeddings; throughput is the same. Delete this when vLLM loads into repacked weights.
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


Range = tuple[int, int]  # positions of an image's first and last token


class Row(NamedTuple):
    """Queries of a request at consecutive positions, the last of which is the last key."""

    request: int
    queries: int
    keys: int
    is_causal: bool


def with_image_rows(builder: Any, batch: Any) -> Any:
    """Return vLLM's metadata of a batch with rows for images, for the layers of a metadata builder.

    vLLM finds the tokens of images for every backend, and its CPU kernel takes causality by row. So a prompt
    becomes several rows for the kernel: text is causal, and an image sees all keys up to its own end.
    """
    images = getattr(batch, "mm_req_doc_ranges", None) or {}
    if not any(images.values()) or not (longest := _longest_image(builder)):
        return batch
    rows = split_rows(batch.query_start_loc.tolist(), batch.seq_lens.tolist()[: batch.num_reqs], images)
    lengths = [row.queries for row in rows if not row.is_causal]
    if not lengths:
        return batch
    if max(lengths) > longest:
        raise NotImplementedError(
            f"vLLM on CPU ends a window of {longest} tokens on both sides, and an image has {max(lengths)}"
            " tokens: use `worker.rollout.name=hf`"
        )
    queries = torch.tensor([0, *(row.queries for row in rows)])
    starts = queries.cumsum(0).to(batch.query_start_loc.dtype)
    return dataclasses.replace(
        batch,
        num_reqs=len(rows),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([row.keys for row in rows], dtype=batch.seq_lens.dtype),
        block_table_tensor=batch.block_table_tensor[[row.request for row in rows]],
        causal=torch.tensor([row.is_causal for row in rows], dtype=torch.int32),
        max_query_len=int(queries.max()),
    )


def split_rows(
    starts: Sequence[int], lengths: Sequence[int], images: Mapping[int, Sequence[Range]]
) -> list[Row]:
    """Split the queries of each request, which are its last tokens, where images start and end."""
    rows: list[Row] = []
    for request, length in enumerate(lengths):
        at = length - (starts[request + 1] - starts[request])  # position of the next query
        for first, last in sorted(images.get(request, ())):
            start, stop = max(first, at), min(last + 1, length)
            if start >= stop:
                continue
            if at < start:
                rows.append(Row(request, start - at, start, True))
            rows.append(Row(request, stop - start, stop, False))
            at = stop
        if at < length:
            rows.append(Row(request, length - at, length, True))
    return rows


def _longest_image(builder: Any) -> int:
    """Return the most tokens of an image that the layers see whole; 0 if they see it causally."""
    from vllm.config import get_layers_from_vllm_config  # noqa: PLC0415 - after its environment
    from vllm.model_executor.layers.attention import Attention  # noqa: PLC0415

    config = builder.vllm_config.model_config.hf_config
    seeing = set(family_of(config).block_layers(config))
    layers: Any = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
    windows = {layer.impl.sliding_window for layer in layers.values()}  # -1 is full attention
    kinds = {FULL if window == -1 else SLIDING for window in windows}
    if kinds & seeing and kinds - seeing:
        raise NotImplementedError(
            f"vLLM on CPU runs full and sliding attention of {config.model_type} together, and images see"
            " their later tokens in one of them only: use `worker.rollout.name=hf`"
        )
    return min((window for window in windows if window != -1), default=sys.maxsize) if kinds & seeing else 0
