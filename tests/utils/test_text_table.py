# SPDX-License-Identifier: Apache-2.0
"""Tables and histograms of text, compared with ones drawn by hand."""

from verl.utils.text_table import histogram, quantile, table


def test_a_table_aligns_its_first_column_left_and_the_others_right():
    assert table([("file", "rows"), ("a.jsonl", 12), ("b", 3)]) == (
        "  file     rows\n  a.jsonl    12\n  b           3\n"
    )


def test_every_value_is_in_one_range_and_ranges_beyond_the_limit_are_marked():
    # 1 to 10 in 5 ranges of 2: 1-2 holds 1, 1, 2; 3-4 nothing; 5-6 holds 5; 9-10 holds 10. A bar has 40.
    lines = histogram([1, 1, 2, 5, 10], limit=8, num_bins=5, indent="").splitlines()

    assert [line.split() for line in lines] == [
        ["1", "-", "2", "#" * 40, "3"],
        ["3", "-", "4", "0"],
        ["5", "-", "6", "#" * 14, "1"],
        ["7", "-", "8", "0"],
        ["9", "-", "10", "#" * 14, "1", ">", "8"],
    ]


def test_equal_values_are_one_range():
    assert histogram([7, 7], limit=9, indent="").split() == ["7", "-", "7", "#" * 40, "2"]


def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed():
    values = [4, 1, 3, 2]

    assert [quantile(values, share) for share in (0.25, 0.26, 0.5, 0.95, 1.0)] == [1, 2, 2, 4, 4]
