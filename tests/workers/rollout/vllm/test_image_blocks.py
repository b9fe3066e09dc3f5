# SPDX-License-Identifier: Apache-2.0
"""Rows of vLLM's attention on CPU, in which tokens of an image see their later ones."""

import pytest
import torch

from verl.workers.rollout.vllm.cpu_patches import Row, split_rows
from verl.workers.rollout.vllm.vllm_import import import_vllm


def test_a_prompt_is_split_where_images_start_and_end():
    # 10 tokens: text 0-2, an image 3-5, text 6, an image 7-8, text 9.
    rows = split_rows([0, 10], [10], {0: [(7, 8), (3, 5)]})

    assert rows == [
        Row(0, 3, 3, True), Row(0, 3, 6, False), Row(0, 1, 7, True), Row(0, 2, 9, False), Row(0, 1, 10, True)
    ]  # fmt: skip


def test_requests_without_images_and_sampled_tokens_stay_whole():
    # A text prompt, a sampled token after an image, and a prompt that is an image.
    rows = split_rows([0, 4, 5, 8], [4, 9, 3], {1: [(2, 5)], 2: [(0, 2)]})

    assert rows == [Row(0, 4, 4, True), Row(1, 1, 9, True), Row(2, 3, 3, False)]


def test_a_prompt_with_a_cached_start_begins_after_it():
    # Tokens 0-4 are cached, which end inside of an image.
    rows = split_rows([0, 5], [10], {0: [(1, 2), (3, 6)]})

    assert rows == [Row(0, 2, 7, False), Row(0, 3, 10, True)]


@pytest.mark.heavy  # imports vLLM
@pytest.mark.parametrize("window", [-1, 8])
def test_vllms_kernel_computes_such_rows(window):
    import_vllm("cpu")
    from vllm import _custom_ops as ops

    heads, kv_heads, size, tokens, block = 4, 2, 32, 30, 128
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(tokens, number, size, generator=generator) for number in (heads, kv_heads, kv_heads)
    )
    cache = torch.zeros(2, kv_heads, 2 * block, size)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(tokens) + block, "vec")
    images = [(5, 8), (20, 25)]
    rows = split_rows([0, tokens], [tokens], {0: images})
    starts = torch.tensor([0, *(row.queries for row in rows)]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([row.keys for row in rows], dtype=torch.int32)
    causal = torch.tensor([row.is_causal for row in rows], dtype=torch.int32)
    found, blocks = torch.zeros_like(query), torch.ones(len(rows), 4, dtype=torch.int32)

    metadata = ops.cpu_attn_get_scheduler_metadata(
        len(rows), heads, kv_heads, size, lengths, torch.float32, starts, False, window, "vec", True, causal
    )
    ops.cpu_attention_with_kv_cache(
        query, keys, values, found, starts, lengths, size**-0.5, False, None, window, blocks, 0.0, metadata,
        None, causal,
    )  # fmt: skip

    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = behind >= 0
    for first, last in images:
        seen[first : last + 1, first : last + 1] = True
    seen &= behind < (tokens if window == -1 else window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), seen, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(0, 1), atol=1e-5, rtol=0)
