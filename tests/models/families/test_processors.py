# SPDX-License-Identifier: Apache-2.0
"""Every family's tokens, positions, features and inputs equal those of transformers' processor and model.

A family that `registry.py` lists is compared as soon as it has a tiny model; a line of `LIMITS` is for one
whose tiles, or whose own forward, ask for other rows.
"""

from typing import NamedTuple

import numpy as np
import pytest

from tests.helpers.families import (
    Tiny,
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
from tests.helpers.family_table import EVERY_TIME, KINDS, SEEING
from tests.helpers.nightly import by_day
from verl.models.families.interface import Kind

SEEDS = 4, 7, 10  # a video and three images; videos around an image; two images and two videos
IMAGE: tuple[Kind, ...] = ("image",)
VIDEO: tuple[Kind, ...] = ("video",)


class Limits(NamedTuple):
    """The rows of a family."""

    low: int = 30  # the shortest and the longest edge of images and frames in pixels
    high: int = 200
    # Kinds of media of the rows in which transformers' own forward can be asked, in place of all.
    forward: tuple[tuple[Kind, ...], ...] = ()
    positions: tuple[Kind, ...] = ()  # kinds in the rows whose positions are transformers', in place of all
    shortest_s: float = 0.1  # of audio


# After a video transformers' positions differ from vLLM's, which training uses: see `test_position_ids.py`.
QWEN_VL = Limits(forward=(IMAGE,), positions=IMAGE)
# There positions of videos have fractions, and shorter clips depend on others: see `test_qwen_omni.py`.
QWEN3_OMNI = Limits(forward=(("image", "audio"),), positions=("image", "audio"), shortest_s=1.0)
# Both kinds share a token, so that their forward takes one at a time: see `test_glm_v.py`.
GLM_V = Limits(forward=(IMAGE, VIDEO))
LIMITS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN_VL),
    "qwen3_omni_moe": QWEN3_OMNI,
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), GLM_V),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), Limits(40, 400)),
    **dict.fromkeys(("gemma3_vl", "gemma4", "gemma4_moe"), Limits(8, 300)),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), Limits(5, 300)),  # slices above 112 x 112 pixels
    **dict.fromkeys(("mistral3", "ministral3"), Limits(5, 500)),  # the tower sees edges of up to 224
    "internvl": Limits(20, 400),
    "llava_onevision": Limits(20, 600),
}


@pytest.fixture(scope="module", params=by_day(KINDS, *EVERY_TIME))
def kind(request):
    return request.param


@pytest.fixture
def tiny(kind):
    return load_tiny(kind)


@pytest.fixture(params=SEEDS)
def seed(request):
    return request.param


@pytest.fixture
def row(tiny, kind, seed):
    return row_of(tiny, kind, seed)


def row_of(tiny: Tiny, kind: str, seed: int, media: tuple[Kind, ...] = ()):
    limits = LIMITS.get(kind, Limits())
    rng = np.random.default_rng(seed)
    kinds = media or tiny.family.kinds
    return random_row(rng, limits.low, limits.high, kinds, shortest_s=limits.shortest_s)


def test_tokens_counted_from_sizes_are_the_processors(tiny, row):
    assert_tokens_are_the_processors(tiny, row)
    assert_media_tokens_match(tiny, row)


def test_rows_of_text_are_the_processors_and_run_through_the_models_own_forward(tiny):
    row = ["What colour is", " the shape?"]

    assert_tokens_are_the_processors(tiny, row)
    assert_media_tokens_match(tiny, row)
    assert_positions_are_the_models(tiny, row)
    assert_inputs_are_the_processors(tiny, row)


@pytest.mark.parametrize("kind", SEEING)
def test_an_image_of_any_size_has_the_processors_number_of_tokens(tiny, kind):
    limits = LIMITS.get(kind, Limits())

    assert_image_sizes_are_the_processors(tiny, np.random.default_rng(9), 40, limits.low, limits.high)


def test_positions_are_the_models(tiny, kind, seed):
    media = LIMITS.get(kind, Limits()).positions

    assert_positions_are_the_models(tiny, row_of(tiny, kind, seed, media))


def test_features_of_one_call_are_those_of_each_medium_alone(tiny, kind):
    assert_features_are_the_models(tiny, [row_of(tiny, kind, seed) for seed in SEEDS])


def test_units_encoded_apart_make_the_medium(tiny, kind):
    assert_units_make_the_whole(tiny, media_of(tiny, row_of(tiny, kind, SEEDS[-1])))


def test_rows_run_through_the_models_own_forward(tiny, kind, seed):
    for media in LIMITS.get(kind, Limits()).forward or (tiny.family.kinds,):
        assert_inputs_are_the_processors(tiny, row_of(tiny, kind, seed, media))
