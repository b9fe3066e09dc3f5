# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni and Qwen3-Omni: turns of a video's frames and its sound, in tokens and positions; audio."""

import numpy as np
import pytest

from tests.helpers.closeness import assert_values_close
from tests.helpers.families import (
    assert_inputs_are_the_processors,
    assert_positions_are_the_models,
    assert_tokens_are_the_processors,
    features_of,
    load_tiny,
    medium_of,
    random_clip,
    random_image,
    random_sound,
)
from verl.models.families.audio.qwen2_5_omni import Qwen25Omni
from verl.models.families.audio.qwen2_audio import audio_tokens
from verl.models.families.audio.qwen3_omni import Qwen3Omni


def row_with_sound(seconds, fps, others=()):
    rng = np.random.default_rng(0)
    film = random_clip(rng, 8, 64, 96, fps)._replace(sound=random_sound(rng, seconds).samples)
    return ["What is heard in\n", film, " and\n", random_image(rng, 64, 64), film, *others, "?"]


@pytest.mark.parametrize("seconds", [0.4, 2.2, 3.0, 4.1, 9.7])  # of sound, to three of frames
def test_tokens_and_positions_of_films_with_sound_are_transformers(seconds):
    assert_all_is_transformers(load_tiny("qwen2_5_omni"), row_with_sound(seconds, fps=8))


# Patches are one and two seconds apart, so that positions are whole numbers.
@pytest.mark.parametrize(("seconds", "fps"), [(1.0, 6), (1.7, 3), (3.0, 6), (4.1, 6), (9.7, 3)])
def test_tokens_and_positions_of_qwen3s_films_with_sound_are_transformers(seconds, fps):
    others = (random_sound(np.random.default_rng(1), 2.3), " then\n")

    assert_all_is_transformers(load_tiny("qwen3_omni_moe"), row_with_sound(seconds, fps, others))


@pytest.mark.parametrize("seed", range(6))
def test_positions_of_qwen3s_random_mixes_are_transformers(seed):
    rng = np.random.default_rng(seed)
    media = [
        random_image(rng, 64, 96),
        random_sound(rng, rng.uniform(1, 4)),
        *(random_clip(rng, 2 * int(rng.integers(1, 5)), 64, size, fps=6) for size in (64, 128)),
    ]
    row = [part for index in rng.permutation(4) for part in (media[index], "red\n")]

    assert_all_is_transformers(load_tiny("qwen3_omni_moe"), row)


def assert_all_is_transformers(tiny, row):
    assert_tokens_are_the_processors(tiny, row)
    assert_positions_are_the_models(tiny, row)
    assert_inputs_are_the_processors(tiny, row)


@pytest.mark.parametrize(
    ("patches", "seconds", "sounds", "expected"),
    [
        (4, 1.0, 120, [["video", 2], ["audio", 50], ["video", 2], ["audio", 50], ["audio", 20]]),
        (4, 1.0, 60, [["video", 2], ["audio", 50], ["video", 2], ["audio", 10]]),
        (4, 1.0, 0, [["video", 2], ["video", 2]]),
        # a frame every five seconds: two turns of sound have none
        (2, 5.0, 130, [["video", 1], ["audio", 50], ["audio", 50], ["video", 1], ["audio", 30]]),
        (1, 2.0, 7, [["video", 1], ["audio", 7]]),
    ],
)
def test_frames_of_two_seconds_come_before_the_sound_of_these_two_seconds(patches, seconds, sounds, expected):
    assert Qwen25Omni().turns(patches, seconds, sounds) == expected


@pytest.mark.parametrize(
    ("frames", "tokens"), [(2, 0), (3, 1), (4, 1), (7, 2), (100, 25), (200, 50), (203, 51)]
)
def test_forty_milliseconds_are_a_token(frames, tokens):
    assert audio_tokens(frames) == tokens


@pytest.mark.parametrize(
    ("patches", "seconds", "sounds", "expected"),
    [
        (2, 1.0, 20, [["video", 1], ["audio", 13], ["video", 1], ["audio", 7]]),
        (3, 1.0, 13, [["video", 1], ["audio", 13], ["video", 2]]),
        (3, 0.25, 5, [["video", 1], ["audio", 4], ["video", 1], ["audio", 1], ["video", 1]]),  # at 3.25, 6.5
        (2, 1.0, 0, [["video", 2]]),
        (1, 2.0, 7, [["video", 1], ["audio", 7]]),
    ],
)
def test_a_patch_of_qwen3_comes_before_the_audio_tokens_that_are_not_earlier(
    patches, seconds, sounds, expected
):
    assert Qwen3Omni().turns(patches, seconds, sounds) == expected


@pytest.mark.parametrize(
    ("frames", "tokens"), [(1, 1), (8, 1), (9, 2), (99, 13), (100, 13), (101, 14), (250, 33), (800, 104)]
)
def test_a_second_is_thirteen_tokens_in_qwen3(frames, tokens):
    assert Qwen3Omni().audio_tokens(frames) == tokens


def test_features_of_a_short_clip_of_qwen3_do_not_depend_on_those_around_it():
    tiny, rng = load_tiny("qwen3_omni_moe"), np.random.default_rng(0)
    short, long = (medium_of(tiny, random_sound(rng, seconds)) for seconds in (0.3, 2.5))

    (alone,) = features_of(tiny, [short])

    assert_values_close(features_of(tiny, [long, short])[1], alone)
