# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni: the turns of a video's frames and its sound, in tokens, positions and parts of files."""

import numpy as np
import pytest

from tests.helpers.families import (
    assert_inputs_are_the_processors,
    assert_positions_are_the_models,
    assert_tokens_are_the_processors,
    load_tiny,
    random_clip,
    random_image,
    random_sound,
)
from verl.models.families.qwen_omni import audio_tokens, turns_of


@pytest.fixture(scope="module")
def tiny():
    return load_tiny("qwen2_5_omni")


def row_with_sound(seconds):
    rng = np.random.default_rng(0)
    film = random_clip(rng, 8, 64, 96)._replace(sound=random_sound(rng, seconds).samples)
    return ["What is heard in\n", film, " and\n", random_image(rng, 64, 64), film, "?"]


@pytest.mark.parametrize("seconds", [0.4, 2.2, 3.0, 4.1, 9.7])  # of sound, to three of frames
def test_tokens_and_positions_of_films_with_sound_are_transformers(tiny, seconds):
    row = row_with_sound(seconds)

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
    assert turns_of(patches, seconds, sounds) == expected


@pytest.mark.parametrize(
    ("frames", "tokens"), [(2, 0), (3, 1), (4, 1), (7, 2), (100, 25), (200, 50), (203, 51)]
)
def test_forty_milliseconds_are_a_token(frames, tokens):
    assert audio_tokens(frames) == tokens
