# SPDX-License-Identifier: Apache-2.0
"""Mistral 3: breaks between rows of tokens, images padded to one size, its windows."""

import numpy as np
import pytest
import torch

from tests.helpers.closeness import assert_values_close
from tests.helpers.families import (
    assert_features_are_the_models,
    assert_tokens_are_the_processors,
    expanded,
    features_of,
    load_tiny,
    media_of,
    own_inputs_of,
    prepared,
    random_image,
)
from tests.helpers.family_training import (
    assert_nothing_is_read_back,
    assert_small,
    training_errors,
)

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


@pytest.mark.parametrize("size", [(224, 224), (225, 28), (28, 225)])
def test_images_at_the_longest_edge_of_the_tower_have_the_processors_tokens(size):
    assert_tokens_are_the_processors(load_tiny("mistral3"), [random_image(np.random.default_rng(0), *size)])


def test_breaks_between_the_rows_of_an_image_have_no_features(tiny):
    # 56 x 84 pixels are 2 x 3 tokens.
    row = [random_image(np.random.default_rng(0), 56, 84)]
    names = tiny.processor.tokenizer.convert_ids_to_tokens(expanded(tiny, row).tolist())
    start = names.index("[IMG]")

    found = tiny.family.media_tokens(tiny.config, expanded(tiny, row))["image"]

    image = [*["[IMG]"] * 3, "[IMG_BREAK]", *["[IMG]"] * 3, "[IMG_END]"]
    assert names[start : start + 8] == image
    assert (found - start).tolist() == [0, 1, 2, 4, 5, 6]


def test_images_of_different_sizes_do_not_see_each_other(tiny):
    rng = np.random.default_rng(0)
    small, wide, tall = (random_image(rng, *size) for size in [(28, 28), (30, 300), (300, 60)])

    together = features_of(tiny, media_of(tiny, [small, wide, tall]))

    for image, features in zip([small, wide, tall], together, strict=True):
        assert_values_close(features_of(tiny, media_of(tiny, [image]))[0], features)


def test_features_of_an_earlier_layer_are_the_models(tiny, monkeypatch):
    last = features_of(tiny, media_of(tiny, IMAGES))
    for config in (tiny.config, prepared(tiny.folder).config):
        monkeypatch.setattr(config, "vision_feature_layer", -2)

    assert_features_are_the_models(tiny, [IMAGES])
    assert not torch.allclose(features_of(tiny, media_of(tiny, IMAGES))[0], last[0], atol=1e-2)


def test_padded_images_are_the_processors(tiny):
    rng = np.random.default_rng(0)
    row = ["a", random_image(rng, 40, 200), "b", random_image(rng, 150, 60)]

    theirs, ours = own_inputs_of(tiny, row), tiny.family.own_inputs(media_of(tiny, row))

    assert torch.equal(theirs["pixel_values"], ours["pixel_values"])
    assert torch.equal(theirs["image_sizes"], ours["image_sizes"])


def test_packed_training_keeps_a_sliding_window():
    tiny = load_tiny("mistral3", sliding_window=16)  # prompts are longer

    assert_small(training_errors(tiny, GROUPS, share_prompt=False))


def test_the_tower_reads_no_length_back_from_the_device(tiny):
    assert_nothing_is_read_back(tiny, IMAGES)
