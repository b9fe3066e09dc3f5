# SPDX-License-Identifier: Apache-2.0
"""InternVL: tokens and features of tiles and frames equal those of transformers' own processor and model."""

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
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions

SIZES = 20, 400


@pytest.fixture(scope="module")
def tiny():
    return load_tiny("internvl")


@pytest.fixture(params=range(4))
def row(request):
    return random_row(np.random.default_rng(request.param), *SIZES)


def test_tokens_counted_from_sizes_are_the_processors(tiny, row):
    assert_tokens_are_the_processors(tiny, row)
    assert_positions_are_the_models(tiny, row)
    assert_media_tokens_match(tiny, row)


def test_an_image_of_any_size_has_the_processors_number_of_tiles(tiny):
    assert_image_sizes_are_the_processors(tiny, np.random.default_rng(9), 200, *SIZES)


def test_features_of_one_call_are_those_of_each_medium_alone(tiny, row):
    assert_features_are_the_models(tiny, [row])


def test_tiles_and_frames_encoded_apart_are_the_medium(tiny, row):
    assert_units_make_the_whole(tiny, media_of(tiny, row))


def test_rows_run_through_the_models_own_forward(tiny, row):
    assert_inputs_are_the_processors(tiny, row)


def test_a_frame_has_the_same_tokens_at_any_size(tiny):
    # so a smaller limit of tokens for each frame is refused
    assert tiny.family.smallest_frame(tiny.processor) == 4
    with pytest.raises(ValueError, match="`tokens_per_frame` must be at least 4"):
        MediaLoader(tiny.processor, MediaOptions(1, 10**6, tokens_per_frame=3), MediaCache(None))
