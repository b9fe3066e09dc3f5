# SPDX-License-Identifier: Apache-2.0
"""Laws of all advantage estimators."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.algorithms.advantage_batches import inputs_for, make_inputs
from verl.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs

NEEDS = {
    "gae": ["values"],
    "gdpo": ["reward_components"],
    "optimal_token_baseline": ["log_probs", "sum_squared_probs"],
    "prime": ["process_rewards", "accuracies"],
    "remax": ["reward_baselines"],
    "tir_optimal_token_baseline": ["log_probs", "sum_squared_probs"],
    "turn_gae": ["values", "turn_ids"],
    "turn_grpo": ["turn_ids"],
}
OPTIONAL = {name: ["importance_weights"] for name in NEEDS if name.endswith("token_baseline")}
WHITENING = ["gae", "gdpo", "prime", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "turn_gae"]
READ = [(name, field) for table in (NEEDS, OPTIONAL) for name, names in table.items() for field in names]

every_estimator = pytest.mark.parametrize("name", ADV_ESTIMATORS.names())


def tensors_of(inputs):
    values = {entry.name: getattr(inputs, entry.name) for entry in fields(AdvantageInputs)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def per_token(inputs):
    shape = inputs.response_mask.shape
    return {name: value for name, value in tensors_of(inputs).items() if value.shape == shape}


def per_row(inputs):
    rows = len(inputs.response_mask)
    return {name: value for name, value in tensors_of(inputs).items() if len(value) == rows}


def of_rows(inputs, rows):
    return replace(inputs, **{name: value[rows] for name, value in per_row(inputs).items()})


@every_estimator
def test_results_are_finite_float32_without_gradient_and_zero_outside_of_the_response(name):
    inputs = inputs_for(name, gamma=0.9)
    needs_gradient = {
        field: value.clone().requires_grad_()
        for field, value in tensors_of(inputs).items()
        if value.is_floating_point()
    }

    for result in ADV_ESTIMATORS[name](replace(inputs, **needs_gradient)):
        assert result.dtype == torch.float32 and result.shape == inputs.response_mask.shape
        assert not result.requires_grad
        assert result.isfinite().all()
        assert result[inputs.response_mask == 0].eq(0).all()
        assert result[inputs.response_mask == 1].ne(0).any()


@every_estimator
@pytest.mark.parametrize("filler", [0.0, float("inf"), -1e30])
def test_the_content_of_the_padding_does_not_matter(name, filler):
    inputs = inputs_for(name, gamma=0.9)  # with NaN
    others = {
        field: value.masked_fill(inputs.response_mask == 0, filler if value.is_floating_point() else 10**6)
        for field, value in per_token(inputs).items()
        if field != "response_mask"
    }

    found = ADV_ESTIMATORS[name](replace(inputs, **others))

    torch.testing.assert_close(found, ADV_ESTIMATORS[name](inputs), atol=0, rtol=0)


@every_estimator
def test_wider_padding_does_not_matter(name):
    inputs = inputs_for(name, gamma=0.9)
    width = inputs.response_mask.shape[1]
    wider = {field: torch.nn.functional.pad(value, (0, 70)) for field, value in per_token(inputs).items()}

    found = ADV_ESTIMATORS[name](replace(inputs, **wider))

    torch.testing.assert_close(
        tuple(result[:, :width] for result in found),
        tuple(ADV_ESTIMATORS[name](inputs)),
        atol=1e-6,
        rtol=1e-5,
    )


@every_estimator
def test_a_bool_mask_equals_an_integer_mask(name):
    inputs = inputs_for(name)

    found = ADV_ESTIMATORS[name](replace(inputs, response_mask=inputs.response_mask.bool()))

    torch.testing.assert_close(found, ADV_ESTIMATORS[name](inputs), atol=0, rtol=0)


@every_estimator
def test_the_order_of_the_rows_does_not_matter(name):
    inputs = inputs_for(name, gamma=0.9)
    order = torch.randperm(len(inputs.group_ids), generator=torch.Generator().manual_seed(1))

    found = ADV_ESTIMATORS[name](of_rows(inputs, order))

    expected = tuple(result[order] for result in ADV_ESTIMATORS[name](inputs))
    torch.testing.assert_close(tuple(found), expected, atol=1e-5, rtol=1e-4)


@every_estimator
def test_a_row_without_a_response_token_is_ignored(name):
    inputs = inputs_for(name)
    kept = inputs.response_mask.any(-1).nonzero().flatten()
    assert 0 < len(kept) < len(inputs.group_ids)
    if name == "grpo_passk":  # so that no group is left with one row
        inputs = replace(inputs, group_ids=inputs.group_ids // 3)

    found = ADV_ESTIMATORS[name](of_rows(inputs, kept))

    expected = tuple(result[kept] for result in ADV_ESTIMATORS[name](inputs))
    torch.testing.assert_close(tuple(found), expected, atol=1e-6, rtol=1e-5)


@every_estimator
def test_inputs_are_not_modified(name):
    inputs = inputs_for(name, gamma=0.9)
    before = {field: value.clone() for field, value in tensors_of(inputs).items()}

    ADV_ESTIMATORS[name](inputs)

    torch.testing.assert_close(tensors_of(inputs), before, atol=0, rtol=0, equal_nan=True)


@every_estimator
def test_a_batch_without_response_tokens_gives_zeros_or_a_clear_error(name):
    inputs = inputs_for(name)
    empty = replace(inputs, response_mask=torch.zeros_like(inputs.response_mask))

    if name in WHITENING:
        with pytest.raises(ValueError, match=rf"{name} whitens .* needs two or more, and the batch has 0"):
            ADV_ESTIMATORS[name](empty)
    else:
        assert all(result.eq(0).all() for result in ADV_ESTIMATORS[name](empty))


@pytest.mark.parametrize("name", WHITENING)
def test_a_single_token_cannot_be_whitened(name):
    inputs = make_inputs(
        [[1.0]],
        [[1]],
        [0],
        values=[[0.0]],
        reward_components=[[1.0]],
        process_rewards=[[1.0]],
        accuracies=[1.0],
        turn_ids=torch.tensor([[0]]),
    )

    with pytest.raises(ValueError, match="needs two or more, and the batch has 1: sample more"):
        ADV_ESTIMATORS[name](inputs)


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in NEEDS for field in NEEDS[name]])
def test_a_missing_input_is_an_error_that_names_its_source(name, field):
    inputs = replace(inputs_for(name), **{field: None})

    with pytest.raises(ValueError, match=rf"`algorithm.adv_estimator` {name} needs `{field}`: \w"):
        ADV_ESTIMATORS[name](inputs)


@pytest.mark.parametrize("name", sorted(set(ADV_ESTIMATORS.names()) - set(NEEDS)))
def test_estimators_work_without_the_inputs_of_others(name):
    inputs = inputs_for(name)

    bare = AdvantageInputs(inputs.token_level_rewards, inputs.response_mask, inputs.group_ids)

    torch.testing.assert_close(ADV_ESTIMATORS[name](bare), ADV_ESTIMATORS[name](inputs), atol=0, rtol=0)


@pytest.mark.parametrize(("name", "field"), READ)
def test_an_input_that_would_broadcast_is_an_error(name, field):
    inputs = inputs_for(name)

    with pytest.raises(ValueError, match="tensors must share one shape"):
        ADV_ESTIMATORS[name](replace(inputs, **{field: getattr(inputs, field)[:1]}))


@every_estimator
@pytest.mark.parametrize(
    ("rewards", "mask", "group_ids"),
    [
        (torch.zeros(4, 2), torch.ones(4, 1), torch.tensor([0, 0, 1, 1])),
        (torch.zeros(4, 2), torch.ones(1, 2), torch.tensor([0, 0, 1, 1])),
        (torch.zeros(4, 2), torch.ones(4, 2), torch.tensor([0])),
        (torch.zeros(2, 2), torch.ones(2, 2), torch.tensor([[0, 0], [0, 0]])),
    ],
)
def test_rewards_masks_and_groups_that_would_broadcast_are_an_error(name, rewards, mask, group_ids):
    inputs = replace(inputs_for(name), token_level_rewards=rewards, response_mask=mask, group_ids=group_ids)

    with pytest.raises(ValueError, match="tensors must share one shape"):
        ADV_ESTIMATORS[name](inputs)


@pytest.mark.parametrize("name", WHITENING)
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_tokens(name):
    inputs = inputs_for(name, gamma=0.9)

    advantages = ADV_ESTIMATORS[name](inputs).advantages[inputs.response_mask == 1].double()

    assert abs(advantages.mean()) < 1e-6
    assert abs(advantages.var() - 1) < 1e-5


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "prime", "turn_gae"])
def test_whitening_survives_a_large_mean(name):
    # A mean of a thousand deviations, as for an untrained critic: float32 sums of squares would lose it.
    mask = torch.ones(200, 8, dtype=torch.int64)
    noise = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    rewards = torch.zeros(200, 8).index_fill(1, torch.tensor([7]), 1000.0) + noise
    inputs = AdvantageInputs(
        rewards,
        mask,
        torch.arange(200),
        values=torch.zeros(200, 8),
        process_rewards=rewards,
        accuracies=torch.zeros(200),
        normalize_process_rewards=False,
        turn_ids=torch.arange(8).expand(200, 8),
    )

    advantages, returns = ADV_ESTIMATORS[name](inputs)

    exact = (returns.double() - returns.double().mean()) / returns.double().std()
    torch.testing.assert_close(advantages, exact.float(), atol=1e-4, rtol=1e-4)
