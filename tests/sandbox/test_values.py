# SPDX-License-Identifier: Apache-2.0
"""The text of values, against Python's own comparison of them."""

import math
from collections import ChainMap, Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from itertools import product

import numpy
import pytest

from verl.sandbox.values import to_text

FORGED = [k * ((1 << 61) - 1) for k in range(9)]  # Python's hash of each is 0


def some_values():
    """Return values of every type, new ones with each call."""
    plain = [None, "", "1", "None", "[]", 'a"b', "\ud800", b"", b"1", bytearray(b"1"), memoryview(b"1")]
    whole = [0, False, 0.0, -0.0, Fraction(0), Decimal("-0"), 0j, 1, True, 1.0, 1 + 0j, Decimal("1.00"), -1]
    large = [
        1 << 53,
        (1 << 53) + 1,
        2.0**53,
        10**22,
        1e22,
        Decimal("1e22"),
        10**400,
        Fraction(10**400),
        1e300,
    ]
    parts = [
        0.5,
        Fraction(1, 2),
        Decimal("0.5"),
        0.5 + 0j,
        0.1,
        Decimal("0.1"),
        Fraction(1, 10),
        0.1 + 0.2,
        0.3,
    ]
    others = [math.inf, Decimal("inf"), -math.inf, 2j, 1 + 2j, 1 - 2j, complex(1, 2.0), Fraction(1, 3)]
    lists = [[], [1], [1.0], [True, []], [[]], [1, 2], [2, 1], ["1"], (), (1,), (1, 2), ([],), ((),)]
    sets = [set(), {1}, {1.0}, frozenset({1}), {1, 2}, {2, 1}, {(1, 2)}, {frozenset({1})}, set(FORGED)]
    dicts = [{}, {1: 2}, {1.0: 2}, {"1": 2}, {1: 2, 3: 4}, {3: 4, 1: 2}, OrderedDict({1: 2}), Counter({1: 2})]
    views = [{1: 2}.keys(), {1: 2}.items(), {1: 2}.values(), {}.keys(), ChainMap({1: 2})]
    return plain + whole + large + parts + others + lists + sets + dicts + views


def test_texts_are_equal_where_python_says_that_values_are():
    for one, other in product(some_values(), some_values()):
        assert (to_text(one) == to_text(other)) is (one == other), (one, other)


def test_a_value_of_another_type_equals_nothing():
    for value in (
        object(),
        iter([1]),
        deque([1]),
        range(1),
        int,
        ...,
        [object()],
        {1: object()},
        Decimal("nan"),
    ):
        assert to_text(value) != to_text(value), value


def test_json_has_no_tuples():
    assert to_text((1, [(2,), {"a": (3,)}]), as_json=True) == to_text([1, [[2], {"a": [3]}]])
    assert to_text((1,), as_json=True) != to_text((1,))


def test_arrays_are_lists_and_nan_is_nan():
    assert to_text(numpy.array([[1, 2], [3, 4]])) == to_text([[1, 2], [3, 4]])
    assert to_text(numpy.float32(0.5)) == to_text(numpy.float64(0.5)) == to_text(0.5)
    assert to_text(numpy.bool_(True)) == to_text(True)
    assert to_text([math.nan]) == to_text([float("nan")])


def test_a_value_that_contains_itself_has_no_text():
    value = []
    value.append(value)

    with pytest.raises(ValueError, match="contains itself or is nested too deeply"):
        to_text(value)
