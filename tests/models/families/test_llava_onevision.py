# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision: tokens and features of tiles and frames are those of its own processor and model."""

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
    random_clip,
    random_image,
    random_row,
    shape_of,
)
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions

SIZES = 20, 600


@pytest.fixture(scope="module")
def tiny():
    return load_tiny("llava_onevision")


@pytest.fixture(params=range(4))
def row(request):
    return random_row(np.random.default_rng(request.param), *SIZES)


def test_tokens_counted_from_sizes_are_the_processors(tiny, row):
    assert_tokens_are_the_processors(tiny, row)
    assert_positions_are_the_models(tiny, row)
    assert_media_tokens_match(tiny, row)


def test_an_image_of_any_size_has_the_processors_number_of_features(tiny):
    assert_image_sizes_are_the_processors(tiny, np.random.default_rng(9), 200, *SIZES)


def test_features_of_one_call_are_those_of_each_medium_alone(tiny, row):
    assert_features_are_the_models(tiny, [row])


def test_tiles_and_frames_encoded_apart_are_the_medium(tiny, row):
    assert_units_make_the_whole(tiny, media_of(tiny, row))


def test_rows_run_through_the_models_own_forward(tiny, row):
    assert_inputs_are_the_processors(tiny, row)


def test_padded_and_reduced_images_are_those_of_the_model(tiny):
    # wide, high, as small as a tile, and one whose grid of 20 x 20 features is reduced
    sizes = [(60, 300), (300, 60), (72, 72), (600, 590)]
    images = [random_image(np.random.default_rng(7), *size) for size in sizes]
    units = [len(shape_of(tiny, image).facts["unit_tiles"]) for image in images]

    assert units == [2, 5, 2, 2]
    assert_features_are_the_models(tiny, [images])
    assert_units_make_the_whole(tiny, media_of(tiny, images))


def test_rows_of_tiles_that_are_padding_have_no_features(tiny, monkeypatch):
    # the only resolution is square, so that a wide image fills the middle row of tiles
    for owner in (tiny.processor.image_processor, tiny.config):
        monkeypatch.setattr(owner, "image_grid_pinpoints", [[216, 216]])
    image = random_image(np.random.default_rng(7), 60, 300)

    assert shape_of(tiny, image).facts["unit_features"] == [25, 0, 48, 0]
    assert_features_are_the_models(tiny, [[image]])
    assert_units_make_the_whole(tiny, media_of(tiny, [image]))


def test_videos_of_several_lengths_are_refused_by_the_models_own_forward(tiny):
    rng = np.random.default_rng(8)
    media = media_of(tiny, [random_clip(rng, frames, 50, 60) for frames in (2, 3)])

    with pytest.raises(ValueError, match=r"videos of one length together, got \[2, 3\] frames"):
        tiny.family.own_inputs(media)


def test_a_frame_has_the_same_tokens_at_any_size(tiny):
    # so a smaller limit of tokens for each frame is refused
    assert tiny.family.smallest_frame(tiny.processor) == 9
    with pytest.raises(ValueError, match="`tokens_per_frame` must be at least 9"):
        MediaLoader(tiny.processor, MediaOptions(1, 10**6, tokens_per_frame=8), MediaCache(None))
