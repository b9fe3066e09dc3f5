# SPDX-License-Identifier: Apache-2.0
"""Rows of vLLM's attention on CPU, in which tokens of an image see their later ones."""

from verl.workers.rollout.vllm_image_blocks import Row, split_rows


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
