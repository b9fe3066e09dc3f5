# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.algorithms.resampling import RESAMPLING_METHODS, resample, resampling_weights


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("method", "power", "expected"),
    [
        ("pow", 2.0, [4.0, 0.25, 1e-8, 9.0, 9.0]),
        ("pow", 1.0, [2.0, 0.5, 1e-8, 3.0, 3.0]),
        ("pow", 0.0, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("max_min", 2.0, [1.0, 1e-8, 1e-8, 1.0, 1.0]),
        ("max_random", 2.0, [0.1, 0.1, 0.1, 0.4, 0.4]),
    ],
)
def test_the_weights_of_a_batch(method, power, expected):
    weights = resampling_weights(torch.tensor([-2.0, 0.5, 0.0, 3.0, 3.0]), method, power)

    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("method", RESAMPLING_METHODS.names())
def test_scores_that_are_all_zero_can_be_drawn_from(method):
    weights = resampling_weights(torch.zeros(4), method, 2.0)

    assert weights.gt(0).all() and weights.unique().numel() == 1
    assert resample(weights, seeded()).shape == (4,)


def test_rows_are_drawn_in_proportion_to_their_weights():
    # 40,000 draws with chances 1/8, 3/8, 0, 4/8 in blocks: three standard errors are below 0.008.
    weights = torch.tensor([1.0, 3.0, 1e-8, 4.0], dtype=torch.float64).repeat(10_000)

    rows = resample(weights, seeded())

    shares = torch.bincount(rows % 4, minlength=4) / len(rows)
    torch.testing.assert_close(shares, torch.tensor([0.125, 0.375, 0.0, 0.5]), atol=8e-3, rtol=0)
    assert rows.dtype == torch.int64 and rows.shape == (40_000,)


def test_the_generator_alone_decides():
    weights = torch.rand(64, generator=seeded(1))
    torch.manual_seed(5)
    state = torch.get_rng_state()

    first = resample(weights, seeded(2))
    again = resample(weights, seeded(2))
    other = resample(weights, seeded(3))

    assert first.equal(again)
    assert not first.equal(other)
    assert torch.get_rng_state().equal(state)


def test_a_restored_generator_continues_its_sequence():
    weights = torch.rand(64, generator=seeded(1))
    generator = seeded(2)
    resample(weights, generator)
    state = generator.get_state()
    expected = resample(weights, generator)
    resumed = torch.Generator()
    resumed.set_state(state)

    assert resample(weights, resumed).equal(expected)


def test_an_unknown_method_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"`algorithm.pf_ppo.reweight_method` must be one of .*max_min.*pow"):
        resampling_weights(torch.ones(2), "min_max", 2.0)


def test_a_negative_power_is_an_error():
    with pytest.raises(ValueError, match=r"`algorithm.pf_ppo.weight_pow` must be 0 or more"):
        resampling_weights(torch.ones(2), "pow", -1.0)


@pytest.mark.parametrize("scores", [torch.ones(2, 2), torch.ones(0), torch.tensor([1.0, float("nan")])])
def test_scores_that_are_not_finite_vectors_are_an_error(scores):
    with pytest.raises(ValueError, match="scores to resample by must be"):
        resampling_weights(scores, "pow", 2.0)
