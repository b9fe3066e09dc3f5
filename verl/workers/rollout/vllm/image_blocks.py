# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention within images for vLLM on CPU, where its attention is causal.

vLLM finds the tokens of images for every backend, and its CPU kernel takes causality by row. So a prompt
becomes several rows for the kernel: text is causal, and an image sees all keys up to its own end.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from verl.models.attention.kernels import FULL, SLIDING
from verl.models.families.registry import family_of

Range = tuple[int, int]  # positions of an image's first and last token


class Row(NamedTuple):
    """Queries of a request at consecutive positions, the last of which is the last key."""

    request: int
    queries: int
    keys: int
    is_causal: bool


def with_image_rows(builder: Any, batch: Any) -> Any:
    """Return vLLM's metadata of a batch with rows for images, for the layers of a metadata builder."""
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
