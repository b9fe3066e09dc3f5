# SPDX-License-Identifier: Apache-2.0
"""Mistral 3: tokens, features and inputs equal those of transformers' own processor and model."""

import numpy as np
import pytest
import torch

from tests.helpers.closeness import assert_values_close
from tests.helpers.families import (
    assert_features_are_the_models,
    assert_inputs_are_the_processors,
    assert_media_tokens_match,
    assert_positions_are_the_models,
    assert_tokens_are_the_processors,
    expanded,
    features_of,
    load_tiny,
    media_of,
    own_inputs_of,
    random_image,
    random_row,
)
from tests.helpers.family_training import (
    assert_nothing_is_read_back,
    assert_small,
    training_errors,
)

SIZES = 20, 400  # the longest edge of what the tower sees is 224
IMAGES = [random_image(np.random.default_rng(seed), *size) for seed, size in enumerate([(60, 90), (30, 30)])]
# Two images of different sizes, one image, text.
GROUPS = [
    (["What colour?\n", IMAGES[0], " or ", IMAGES[1]], (5, 8, 3)),
    ([IMAGES[1], "How many?"], (4, 1)),
    (["What colour is the shape?"], (6,)),
]


@pytest.fixture(params=["mistral3", "ministral3"])
def tiny(request):
    return load_tiny(request.param)


@pytest.fixture(params=range(4))
def row(request):
    return random_row(np.random.default_rng(request.param), *SIZES, kinds=["image"])


def test_tokens_counted_from_sizes_are_the_processors(tiny, row):
    assert_tokens_are_the_processors(tiny, row)
    assert_media_tokens_match(tiny, row)
    assert_positions_are_the_models(tiny, row)


def test_token_counts_of_many_sizes_are_the_processors():
    tiny, rng = load_tiny("mistral3"), np.random.default_rng(0)

    for height, width in [(5, 5), (5, 500), (500, 5), (224, 224), (225, 28), *rng.integers(3, 600, (60, 2))]:
        assert_tokens_are_the_processors(tiny, [random_image(rng, int(height), int(width))])


def test_breaks_between_the_rows_of_an_image_have_no_features(tiny):
    # 56 x 84 pixels are 2 x 3 tokens.
    row = [random_image(np.random.default_rng(0), 56, 84)]
    names = tiny.processor.tokenizer.convert_ids_to_tokens(expanded(tiny, row).tolist())
    start = names.index("[IMG]")

    found = tiny.family.media_tokens(tiny.config, expanded(tiny, row))["image"]

    image = [*["[IMG]"] * 3, "[IMG_BREAK]", *["[IMG]"] * 3, "[IMG_END]"]
    assert names[start : start + 8] == image
    assert (found - start).tolist() == [0, 1, 2, 4, 5, 6]


def test_features_of_one_call_are_those_of_each_image_alone(tiny, row):
    assert_features_are_the_models(tiny, [row, row[:2]])


def test_images_of_different_sizes_do_not_see_each_other(tiny):
    rng = np.random.default_rng(0)
    small, wide, tall = (random_image(rng, *size) for size in [(28, 28), (30, 300), (300, 60)])

    together = features_of(tiny, media_of(tiny, [small, wide, tall]))

    for image, features in zip([small, wide, tall], together, strict=True):
        assert_values_close(features_of(tiny, media_of(tiny, [image]))[0], features)


def test_features_of_an_earlier_layer_are_the_models(tiny, monkeypatch):
    last = features_of(tiny, media_of(tiny, IMAGES))
    monkeypatch.setattr(tiny.config, "vision_feature_layer", -2)

    assert_features_are_the_models(tiny, [IMAGES])
    assert not torch.allclose(features_of(tiny, media_of(tiny, IMAGES))[0], last[0], atol=1e-2)


def test_padded_images_are_the_processors(tiny):
    rng = np.random.default_rng(0)
    row = ["a", random_image(rng, 40, 200), "b", random_image(rng, 150, 60)]

    theirs, ours = own_inputs_of(tiny, row), tiny.family.own_inputs(media_of(tiny, row))

    assert torch.equal(theirs["pixel_values"], ours["pixel_values"])
    assert torch.equal(theirs["image_sizes"], ours["image_sizes"])


def test_rows_with_images_run_through_the_models_own_forward(tiny, row):
    assert_inputs_are_the_processors(tiny, row)


def test_packed_training_keeps_a_sliding_window():
    tiny = load_tiny("mistral3", sliding_window=16)  # prompts are longer

    assert_small(training_errors(tiny, GROUPS, share_prompt=False))


def test_the_tower_reads_no_length_back_from_the_device(tiny):
    assert_nothing_is_read_back(tiny, IMAGES)
