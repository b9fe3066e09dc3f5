# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.algorithms.token_selection import (
    TOKEN_SELECTIONS,
    SelectionInputs,
    clip_cov,
    covariances,
    kl_cov,
    token_hashes,
)

FIELDS = ("log_probs", "old_log_probs", "advantages", "row_ids", "positions")


def make_inputs(advantages, log_probs, old_log_probs=None, **options):
    """Tokens of rows of three."""
    log_probs = torch.tensor(log_probs)
    old = log_probs if old_log_probs is None else torch.tensor(old_log_probs)
    numbers = torch.arange(len(log_probs))
    options = {"seed": 0} | options
    return SelectionInputs(log_probs, old, torch.tensor(advantages), numbers // 3, numbers % 3, **options)


def random_inputs(number=4000, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(number, generator=generator) * 5
    advantages = torch.randn(number, generator=generator).round(decimals=1)
    return make_inputs(advantages.tolist(), log_probs.round(decimals=1).tolist(), **options)


def permuted(inputs, order):
    return replace(inputs, **{name: getattr(inputs, name)[order] for name in FIELDS})


def chosen(selected):
    return selected.nonzero().squeeze(-1).tolist()


def splitmix(state):
    """splitmix64's output function on Python's integers, modulo 2**64."""
    size = 2**64
    z = (state + 0x9E3779B97F4A7C15) % size
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % size
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % size
    return z ^ (z >> 31)


def test_covariances_by_hand():
    # Means 1 and -2: deviations of A 2, 0, -2, 0 and of the log-probs 1, -1, 1, -1.
    inputs = make_inputs([3.0, 1.0, -1.0, 1.0], [-1.0, -3.0, -1.0, -3.0])

    assert covariances(inputs).tolist() == [2, 0, -2, 0]


def test_kl_cov_selects_the_largest_covariances():
    # Deviations of A 3, 1, -1, -3 and of the log-probs 1, -1, 1, -1: covariances 3, -1, -1, 3.
    # Three quarters of four tokens are three: both of 3, one of the two of -1.
    inputs = make_inputs([3.0, 1.0, -1.0, -3.0], [-1.0, -3.0, -1.0, -3.0], ratio=0.5)

    assert chosen(kl_cov(inputs)) == [0, 3]
    more = chosen(kl_cov(replace(inputs, ratio=0.75)))
    assert len(more) == 3 and {0, 3} < set(more)


@pytest.mark.parametrize(("ratio", "number"), [(2e-4, 1), (0.0, 1), (0.0012, 4), (0.5, 2000), (1.0, 4000)])
def test_kl_cov_rounds_down_but_selects_at_least_one(ratio, number):
    assert kl_cov(random_inputs(ratio=ratio)).sum() == number


def test_clip_cov_selects_only_unclipped_tokens_between_its_bounds():
    # Deviations of A 4, 2, -1, -5 and of the log-probs 1, 1, -1, -1: covariances 4, 2, 1, 5.
    # The ratio of the second is e^0.5 with a positive advantage: clipped.
    inputs = make_inputs(
        [5.0, 3.0, 0.0, -4.0], [-1.0, -1.0, -3.0, -3.0], [-1.0, -1.5, -3.0, -3.0],
        ratio=1.0, lower=1.0, upper=5.0,
    )  # fmt: skip

    assert covariances(inputs).tolist() == [4, 2, 1, 5]
    assert chosen(clip_cov(inputs)) == [0]
    assert chosen(clip_cov(replace(inputs, clip_ratio_high=1.0))) == [0, 1]
    assert chosen(clip_cov(replace(inputs, lower=0.5, upper=5.5))) == [0, 2, 3]


def test_clip_cov_without_candidates_selects_nothing():
    assert not clip_cov(random_inputs(lower=1e6, upper=1e7)).any()


@pytest.mark.parametrize(("ratio", "number"), [(2e-4, 1), (0.0012, 4), (0.01, 40)])
def test_clip_cov_selects_a_fraction_of_all_tokens_rounded_down(ratio, number):
    assert clip_cov(random_inputs(ratio=ratio, lower=0.5)).sum() == number


def test_clip_cov_selects_all_candidates_if_there_are_too_few():
    inputs = random_inputs(ratio=1.0, lower=1.0, upper=5.0)
    cov = covariances(inputs)

    assert torch.equal(clip_cov(inputs), (cov > 1) & (cov < 5))


@pytest.mark.parametrize("name", list(TOKEN_SELECTIONS))
@pytest.mark.parametrize("seed", range(5))
def test_the_selection_does_not_depend_on_token_order(name, seed):
    inputs = random_inputs(seed=seed, ratio=0.01)  # rounded numbers: many covariances are equal
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(seed))

    selected = TOKEN_SELECTIONS[name](inputs)

    assert selected.any()
    assert torch.equal(TOKEN_SELECTIONS[name](permuted(inputs, order)), selected[order])
    assert torch.equal(covariances(permuted(inputs, order)), covariances(inputs)[order])


def test_ties_are_broken_by_the_seed():
    inputs = make_inputs([1.0, -1.0] * 500, [-1.0, -2.0] * 500, ratio=0.05)  # all covariances are 0.5

    first, again, other = (kl_cov(replace(inputs, seed=seed)) for seed in (1, 1, 2))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.sum() == other.sum() == 50


def test_candidates_are_selected_with_equal_probability():
    # 20 candidates, one chosen with each of 2000 seeds: 100 expected, standard deviation 9.7.
    inputs = make_inputs([1.0, -1.0] * 10, [-1.0, -2.0] * 10, ratio=0.05, lower=0.1)

    counts = sum(clip_cov(replace(inputs, seed=seed)).int() for seed in range(2000))

    assert counts.sum() == 2000
    assert counts.min() > 60 and counts.max() < 140


@pytest.mark.parametrize("seed", [0, 7, -3, 2**63 - 1, 10**30])
def test_hashes_equal_splitmix64(seed):
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the generator's first number from state 0
    row_ids = torch.tensor([0, 0, 5, 123456789])
    positions = torch.tensor([0, 1, 0, 4095])
    zeros = torch.zeros(4)

    hashes = token_hashes(SelectionInputs(zeros, zeros, zeros, row_ids, positions, seed=seed))

    for row, position, found in zip(row_ids.tolist(), positions.tolist(), hashes.tolist(), strict=True):
        assert found % 2**64 == splitmix(splitmix(splitmix(seed % 2**64) ^ row) ^ position)


@pytest.mark.parametrize("name", list(TOKEN_SELECTIONS))
def test_a_mini_batch_without_tokens_selects_nothing(name):
    assert TOKEN_SELECTIONS[name](make_inputs([], [])).tolist() == []


def test_a_duplicated_row_counts_twice():
    inputs = make_inputs([3.0, 1.0, -1.0, -3.0], [-1.0, -3.0, -1.0, -3.0], ratio=0.5)
    twice = permuted(inputs, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))

    assert chosen(kl_cov(twice)) == [0, 1, 6, 7]


@pytest.mark.parametrize("name", list(TOKEN_SELECTIONS))
@pytest.mark.parametrize("field", FIELDS)
def test_tensors_that_would_broadcast_are_rejected(name, field):
    inputs = random_inputs(number=6)

    with pytest.raises(ValueError, match=field):
        TOKEN_SELECTIONS[name](replace(inputs, **{field: getattr(inputs, field)[:1]}))


def test_every_selection_has_a_loss_of_the_same_name():
    assert set(TOKEN_SELECTIONS) <= set(POLICY_LOSSES)
