# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision: images that are padded, reduced or longer than their tiles."""

import numpy as np
import pytest

from tests.helpers.families import (
    assert_features_are_the_models,
    assert_units_make_the_whole,
    load_tiny,
    media_of,
    random_clip,
    random_image,
    shape_of,
)


@pytest.fixture(scope="module")
def tiny():
    return load_tiny("llava_onevision")


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
