# SPDX-License-Identifier: Apache-2.0
"""Models whose images are tiles, packed, with shared prompts and over ranks: their own padded forward."""

import numpy as np
import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.families import load_tiny, random_clip, random_image
from tests.helpers.family_training import assert_small, errors_on_ranks, load_model, training_errors
from verl.models.registry import check_model

KINDS = ("internvl", "llava_onevision")
RNG = np.random.default_rng(3)
SMALL, TALL, WIDE = (random_image(RNG, *size) for size in ((60, 60), (150, 60), (60, 90)))
GROUPS = [
    (["How many?"], (4, 7)),
    ([WIDE, "What colour?"], (5,)),
    (["a", SMALL, " or ", TALL], (3, 6)),
    ([random_clip(RNG, 3, 64, 96), "red"], (2, 5)),
    (["a\n", random_clip(RNG, 3, 64, 64), " and ", WIDE, "?"], (6, 2)),  # a video before an image
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share_prompt", [False, True])
def test_packed_training_is_the_models_own_padded_forward(kind, share_prompt):
    assert_small(training_errors(load_tiny(kind), GROUPS, share_prompt=share_prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_micro_batches_have_the_same_gradients(kind):
    parts = [[2, 5], [0, 3], [], [1, 4, 6, 7, 8]]

    assert_small(training_errors(load_tiny(kind), GROUPS, share_prompt=False, checkpointed=True, parts=parts))


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_at_start_accepts_the_family(kind):
    assert check_model(load_model(load_tiny(kind), True)) < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_gradients_of_one(kind):
    for found in run_distributed(errors_on_ranks, 2, load_tiny(kind).folder, GROUPS):
        assert_small(*found.values())
