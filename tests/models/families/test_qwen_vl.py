# SPDX-License-Identifier: Apache-2.0
"""Qwen-VL: tokens, features and positions equal those of transformers' own processor and model."""

import numpy as np
import pytest

from tests.helpers.families import (
    Clip,
    assert_features_are_the_models,
    assert_inputs_are_the_processors,
    assert_media_tokens_match,
    assert_positions_are_the_models,
    assert_tokens_are_the_processors,
    assert_units_make_the_whole,
    load_tiny,
    media_of,
    random_row,
)

SIZES = 30, 200


@pytest.fixture(params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def tiny(request):
    return load_tiny(request.param)


@pytest.fixture(params=range(3))
def row(request):
    return random_row(np.random.default_rng(request.param), *SIZES)


def test_tokens_counted_from_sizes_are_the_processors(tiny, row):
    assert_tokens_are_the_processors(tiny, row)
    assert_media_tokens_match(tiny, row)


def test_features_of_one_call_are_those_of_each_medium_alone(tiny, row):
    assert_features_are_the_models(tiny, [row])


def test_frames_encoded_apart_are_the_video(tiny, row):
    assert_units_make_the_whole(tiny, media_of(tiny, row))


def test_rows_with_images_run_through_the_models_own_forward(tiny, row):
    # after a video transformers' positions differ from vLLM's, which training uses
    images = [part for part in row if not isinstance(part, Clip)]
    assert_positions_are_the_models(tiny, images)
    assert_inputs_are_the_processors(tiny, images)
