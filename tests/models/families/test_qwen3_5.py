# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5: tokens, positions and features equal those of transformers' own processor and model."""

import numpy as np
import pytest

from tests.helpers.families import (
    assert_features_are_the_models,
    assert_image_sizes_are_the_processors,
    assert_inputs_are_the_processors,
    assert_media_tokens_match,
    assert_positions_are_the_models,
    assert_tokens_are_the_processors,
    assert_units_make_the_whole,
    load_tiny,
    media_of,
    random_row,
)

SIZES = 40, 400
KINDS = ("qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module", params=KINDS)
def tiny(request):
    return load_tiny(request.param)


@pytest.fixture(params=range(4))
def row(request):
    return random_row(np.random.default_rng(request.param), *SIZES)


def test_tokens_counted_from_sizes_are_the_processors(tiny, row):
    assert_tokens_are_the_processors(tiny, row)
    assert_media_tokens_match(tiny, row)


def test_positions_are_transformers(tiny, row):
    assert_positions_are_the_models(tiny, row)


def test_an_image_of_any_size_has_the_processors_number_of_tokens(tiny):
    assert_image_sizes_are_the_processors(tiny, np.random.default_rng(9), 40, *SIZES)


def test_features_of_one_call_are_those_of_each_medium_alone(tiny, row):
    assert_features_are_the_models(tiny, [row])


def test_frames_encoded_apart_are_the_video(tiny, row):
    assert_units_make_the_whole(tiny, media_of(tiny, row))


def test_rows_run_through_the_models_own_forward(tiny, row):
    assert_inputs_are_the_processors(tiny, row)
