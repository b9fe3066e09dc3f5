# SPDX-License-Identifier: Apache-2.0
"""Every family does what the table of docs/models.md says, in float32."""

import pytest

from tests.helpers.family_table import (
    ABILITIES,
    KINDS,
    PAGE,
    TABLE,
    divisions_of,
    on_two_ranks,
    table,
)
from tests.helpers.family_training import LARGEST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ability", ABILITIES)
def test_every_ability_computes_what_the_models_own_forward_does(ability, kind):
    assert ABILITIES[ability](kind) < LARGEST


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_divided_over_two_ranks_log_probs_and_gradients_stay(kind):
    errors = on_two_ranks()[kind]

    assert [*errors] == divisions_of(kind)
    assert all(error < LARGEST for error in errors.values()), errors


@pytest.mark.heavy
def test_the_page_has_the_table_that_the_tests_make():
    (written,) = TABLE.findall(PAGE.read_text())

    assert written == table(), "python -m tests.helpers.family_table writes it"
