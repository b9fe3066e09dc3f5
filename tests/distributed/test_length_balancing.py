# SPDX-License-Identifier: Apache-2.0
import itertools
import random

import pytest

from verl.distributed.length_balancing import (
    balance,
    balance_groups,
    length_metrics,
    split_evenly,
    workload,
)


def sums(costs, parts):
    return sorted(sum(costs[item] for item in part) for part in parts)


def test_differencing_splits_the_textbook_example_as_published():
    # Karmarkar and Karp on {8, 7, 6, 5, 4}: 8-7=1, 6-5=1, 4-1=3, 3-1=2, so the sums are 16 and 14.
    costs = [8, 7, 6, 5, 4]

    assert sums(costs, balance(costs, 2)) == [14, 16]


def test_equal_sizes_are_kept_even_if_costs_become_uneven():
    # Best with two items each: {9, 1} and {1, 1}.
    costs = [9, 1, 1, 1]

    parts = balance(costs, 2, equal_size=True)

    assert [len(part) for part in parts] == [2, 2]
    assert sums(costs, parts) == [2, 10]


@pytest.mark.parametrize("seed", range(20))
def test_every_item_is_in_one_part_and_the_spread_is_small(seed):
    generator = random.Random(seed)
    parts = generator.choice([1, 2, 3, 8])
    costs = [generator.randint(1, 1000) for _ in range(parts * generator.randint(4, 12))]

    for equal_size in (False, True):
        found = balance(costs, parts, equal_size)
        assert sorted(item for part in found for item in part) == list(range(len(costs)))
        assert len(found) == parts
        if equal_size:
            assert {len(part) for part in found} == {len(costs) // parts}
        low, *_, high = sums(costs, found) if parts > 1 else (0, 0)
        assert high - low <= max(costs)


def test_more_parts_than_items_leave_some_empty():
    assert sorted(map(len, balance([3, 4], 4))) == [0, 0, 1, 1]
    assert balance([], 2) == [[], []]


def test_equal_sizes_need_a_divisible_number_of_items():
    with pytest.raises(ValueError, match="3 items cannot be divided into 2 parts"):
        balance([1, 2, 3], 2, equal_size=True)


def test_groups_stay_together_and_ranks_get_equal_numbers_of_rows():
    lengths = [10, 10, 500, 400, 20, 30, 300, 450]
    groups = ["a", "a", "b", "b", "c", "c", "d", "d"]

    parts = balance_groups(lengths, groups, 2)

    assert sorted(tuple(sorted({groups[row] for row in part})) for part in parts) in (
        [("a", "b"), ("c", "d")],
        [("a", "d"), ("b", "c")],
    )
    assert all(len(part) == 4 for part in parts)


def test_a_number_of_groups_that_is_not_divisible_is_refused():
    with pytest.raises(ValueError, match=r"3 groups of \[1\] sequences cannot be divided over 2 ranks"):
        balance_groups([1, 2, 3], [0, 1, 2], 2)


def test_work_grows_faster_than_length():
    assert workload([2]) == 2 * 24576 + 4
    assert workload([2000]) > 2 * workload([1000])


def test_a_shared_prompt_counts_once():
    # Prompt 10, responses 2 and 3. Tokens: 15. Attention: 10^2 for the prompt, and for the responses the
    # squares of whole sequences less the prompt's: 12^2 - 10^2 = 44 and 13^2 - 10^2 = 69.
    assert workload([12, 13], prompt=10) == 15 * 24576 + 100 + 44 + 69
    assert workload([12], prompt=10) == workload([12])


def test_groups_are_balanced_by_the_work_of_shared_prompts():
    # Pairs of sequences of 100, 80, 50 and 45 tokens. As they are, the best is {a, d} and {b, c}. But a
    # shares 99 tokens: 101, 159, 99 and 89 tokens are left to run, so {a, c} and {b, d} is better.
    lengths = [100, 100, 80, 80, 50, 50, 45, 45]
    prompts = [99, 99, 1, 1, 1, 1, 1, 1]
    groups = ["a", "a", "b", "b", "c", "c", "d", "d"]

    separate, shared = (balance_groups(lengths, groups, 2, own) for own in (None, prompts))

    assert sorted(map(sorted, separate)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert sorted(map(sorted, shared)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_spans_minimize_the_largest_sum():
    # 7 2 5 | 10 8 is 14 and 18; every other cut leaves more than 18 on one side.
    assert split_evenly([7, 2, 5, 10, 8], 2) == [0, 3, 5]
    assert split_evenly([4], 3) == [0, 1, 1, 1]
    assert split_evenly([], 2) == [0, 0, 0]


@pytest.mark.parametrize("seed", range(10))
def test_spans_are_as_even_as_the_best_of_all_splits(seed):
    generator = random.Random(seed)
    costs = [generator.randint(0, 20) for _ in range(generator.randint(1, 8))]
    parts = generator.randint(1, 4)

    bounds = split_evenly(costs, parts)

    def largest(cuts):
        return max(sum(costs[start:stop]) for start, stop in itertools.pairwise(cuts))

    every = itertools.combinations_with_replacement(range(len(costs) + 1), parts - 1)
    assert len(bounds) == parts + 1
    assert largest(bounds) == min(largest([0, *cuts, len(costs)]) for cuts in every)


def test_length_metrics_compare_ranks_before_and_after():
    # Before: rows 0, 1 | 2, 3 -> 3 and 30; after: 1 + 20 and 2 + 10.
    metrics = length_metrics([1, 2, 10, 20], [[0, 3], [1, 2]])

    assert metrics == {
        "global_seqlen/min": 3, "global_seqlen/max": 30, "global_seqlen/minmax_diff": 27,
        "global_seqlen/balanced_min": 12, "global_seqlen/balanced_max": 21, "global_seqlen/mean": 16.5,
    }  # fmt: skip
