# SPDX-License-Identifier: Apache-2.0
"""A packed forward equals the models' own, with and without shared prompts, on one rank and two."""

import pytest

from tests.helpers.families import load_tiny
from tests.helpers.family_forward import GROUPS, assert_packed_equals_own, assert_ranks_equal_own

KINDS = ["internvl", "llava_onevision"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share_prompt", [False, True])
def test_packed_rows_equal_the_models_own_forward(kind, share_prompt):
    assert_packed_equals_own(load_tiny(kind), GROUPS, share_prompt=share_prompt)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_the_models_own_forward(kind):
    assert_ranks_equal_own(kind, GROUPS)
