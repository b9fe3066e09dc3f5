# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V: numbers and slices of images, positions on a canvas, a tower that reads nothing back."""

import numpy as np
import pytest

from tests.helpers.families import (
    assert_positions_are_the_models,
    assert_tokens_are_the_processors,
    expanded,
    load_tiny,
    random_clip,
    random_image,
)
from tests.helpers.family_training import (
    assert_nothing_is_read_back,
)

RNG = np.random.default_rng(1)
IMAGES = [random_image(RNG, 60, 90), random_image(RNG, 200, 90)]  # the second in slices
CLIP = random_clip(RNG, 2, 60, 60)


@pytest.fixture(params=["minicpmv4_6", "minicpmv4_7"])
def tiny(request):
    return load_tiny(request.param)


def test_images_and_videos_of_a_prompt_are_numbered_apart(tiny):
    rng = np.random.default_rng(0)
    image, clip = random_image(rng, 60, 60), random_clip(rng, 1, 60, 60)

    tokens = tiny.processor.tokenizer.decode(expanded(tiny, [image, clip, image]).tolist())

    numbers = [part.split("<image_id>")[1] for part in tokens.split("</image_id>")[:-1]]
    # In 4.7 videos have none.
    assert numbers == (["0", "0", "1"] if tiny.family.numbers_videos else ["0", "1"])


def test_pictures_without_text_between_them_have_the_models_positions(tiny, monkeypatch):
    monkeypatch.setattr(tiny.processor, "default_use_image_id", False)
    small, sliced = IMAGES

    for row in (
        [small, sliced, "a"],
        [sliced, "\n", small, "\n", sliced],
        [CLIP, sliced, CLIP],
        [sliced, "\n\na"],
    ):
        assert_positions_are_the_models(tiny, row)


def test_images_are_not_numbered_if_the_processor_says_so(tiny, monkeypatch):
    monkeypatch.setattr(tiny.processor, "default_use_image_id", False)

    assert_tokens_are_the_processors(tiny, [random_image(np.random.default_rng(0), 60, 60)])


def test_images_are_not_sliced_if_the_processor_says_so(tiny, monkeypatch):
    row = [random_image(np.random.default_rng(0), 400, 300)]
    sliced = len(expanded(tiny, row))
    monkeypatch.setattr(tiny.processor.image_processor, "slice_mode", False)

    assert_tokens_are_the_processors(tiny, row)
    assert len(expanded(tiny, row)) < sliced


def test_frames_that_the_processor_would_join_are_refused(tiny, monkeypatch):
    monkeypatch.setattr(tiny.processor.video_processor, "stack_frames", 2)

    with pytest.raises(ValueError, match="`stack_frames` must be 1"):
        expanded(tiny, [random_clip(np.random.default_rng(0), 2, 60, 60)])


def test_the_tower_reads_no_length_back_from_the_device(tiny):
    assert_nothing_is_read_back(tiny, [*IMAGES, CLIP])
