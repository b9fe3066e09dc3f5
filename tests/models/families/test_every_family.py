# SPDX-License-Identifier: Apache-2.0
"""Every family does what the table of docs/models.md says, in float32."""

import pytest

from tests.helpers.families import load_tiny
from tests.helpers.family_table import (
    ABILITIES,
    EVERY_TIME,
    KINDS,
    PAGE,
    TABLE,
    divisions_of,
    error_of,
    groups_of,
    on_two_ranks,
    own_of,
    table,
)
from tests.helpers.family_training import LARGEST, assert_small, load_model, training_errors
from tests.helpers.nightly import by_day
from verl.models.families.interface import is_part
from verl.models.families.registry import family_of
from verl.models.registry import check_model

kinds = pytest.mark.parametrize("kind", by_day(KINDS, *EVERY_TIME))


@kinds
@pytest.mark.parametrize("ability", ABILITIES)
def test_every_ability_computes_what_the_models_own_forward_does(ability, kind):
    assert error_of(ability, kind) < LARGEST


@kinds
def test_checkpointed_micro_batches_have_the_same_gradients(kind):
    tiny, groups = load_tiny(kind), groups_of(kind)
    rest = range(4, sum(len(lengths) for _, lengths in groups))
    parts = [[2], [0, 3], [], [1, *rest]]

    assert_small(
        training_errors(tiny, groups, share_prompt=False, checkpointed=True, parts=parts, own=own_of(kind))
    )


@kinds
def test_every_weight_belongs_to_the_encoder_or_to_the_language_model(kind):
    tiny = load_tiny(kind)
    parts = family_of(tiny.config).encoder
    modules = tiny.model.get_decoder(), tiny.model.get_output_embeddings()
    decoder = {id(weight) for module in modules for weight in module.parameters()}

    encoder = {id(weight) for name, weight in tiny.model.named_parameters() if is_part(name, parts)}

    assert encoder and decoder.isdisjoint(encoder)
    assert decoder | encoder == {id(weight) for weight in tiny.model.parameters()}


@kinds
def test_the_check_at_start_accepts_the_family(kind):
    tiny = load_tiny(kind)

    assert check_model(load_model(tiny, prepared=True), tiny.processor) < 1e-5


@pytest.mark.heavy
@pytest.mark.nightly("verl/workers", "verl/distributed")  # tests/equivalence divides two in every suite
@pytest.mark.parametrize("kind", KINDS)
def test_divided_over_two_ranks_log_probs_and_gradients_stay(kind):
    errors = on_two_ranks()[kind]

    assert [*errors] == divisions_of(kind)
    assert all(error < LARGEST for error in errors.values()), errors


@pytest.mark.heavy
@pytest.mark.nightly("verl/workers", "verl/distributed")  # tests/equivalence divides two in every suite
def test_the_page_has_the_table_that_the_tests_make():
    (written,) = TABLE.findall(PAGE.read_text())

    assert written == table(), "python -m tests.helpers.family_table writes it"
