# SPDX-License-Identifier: Apache-2.0
"""Whatever a reward function returns gives finite floats, or an error that names the function."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from verl.rewards.function import OPTION, load_reward_function

ROWS = [{"prompt": "2 + 2?", "response": "four", "ground_truth": "4"}, {"prompt": "3?", "response": "6"}]


class Liar(dict):
    """Says that it holds every key and has any length."""

    def __contains__(self, key):
        return True

    def __len__(self):
        return 2


class Refuses:
    """Raises whatever it is asked, but for its looks, which the search itself asks for."""

    ndim = 0

    def item(self):
        raise SystemExit(3)

    __float__ = __bool__ = __len__ = __iter__ = __str__ = item


class RefusesToBeShown(Refuses):
    """Cannot even be told in an error."""

    def __repr__(self):
        raise ZeroDivisionError

    @property
    def ndim(self):
        raise RuntimeError


class RefusingNumber(float):
    """A number that is none."""

    def __float__(self):
        raise ZeroDivisionError


class OwnText(str):
    """A name of a class that no other process knows."""

    def __str__(self):
        return self


def endless():
    while True:
        yield {"overall": 1.0}


numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
    st.sampled_from(
        [
            10**400,
            -(10**400),
            10**5000,
            Fraction(10**400, 3),
            RefusingNumber(1.0),
            Refuses(),
            None,
            "1",
            "",
            b"1",
            np.float32(0.5),
            np.float64("nan"),
            np.int64(3),
            np.bool_(True),
            np.array(2.0),
            np.array([1.0]),
            np.array("x"),
            np.datetime64("2020-01-01"),
            torch.tensor(0.5),
            torch.tensor(0.5, dtype=torch.bfloat16),
            torch.tensor([1.0]),
            torch.tensor(1j),
        ]
    ),
)
keys = st.sampled_from(
    ["overall", "reward", "accuracy", "", 1, "1", None, OwnText("overall"), OwnText("a"), ("a",), Refuses]
)
rows = st.dictionaries(keys, numbers, max_size=4) | st.dictionaries(keys, numbers, max_size=2).map(Liar)
good_rows = rows.map(lambda row: row | {"overall": 1.0})
columns = st.lists(numbers, min_size=2, max_size=2) | st.lists(numbers, max_size=3)
tables = st.dictionaries(
    keys, columns | numbers | st.sampled_from([np.zeros(2), np.zeros((2, 2)), torch.ones(2)]), max_size=3
)
results = st.one_of(
    numbers,
    rows,
    tables,
    st.lists(good_rows, min_size=2, max_size=2),
    st.lists(rows | numbers, max_size=3),
    st.tuples(good_rows, good_rows),
    st.sampled_from([Refuses(), endless, Liar(), [Liar(), Liar()], object, ROWS]),
    st.builds(endless),
    st.builds(range, st.just(2)),
    st.builds(iter, st.just([])),
)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """A function of each convention that returns what it is told."""
    folder, functions = tmp_path_factory.mktemp("reward"), {}
    for kind in ("batch", "sequential", "dataproto"):
        source = f"REWARD_TYPE = {kind!r}\nRESULT = []\ndef main(data):\n    return RESULT[0]\n"
        (folder / f"{kind}.py").write_text(source)
        functions[kind] = load_reward_function(str(folder / f"{kind}.py"))
    return functions


@pytest.mark.parametrize("kind", ["batch", "sequential", "dataproto"])
@given(results)
@example([{"overall": 10**400}, {"overall": 1}])
@example([{"overall": 1, OwnText("a"): 2}, {"overall": 1}])
@example([{"overall": 1, 1: 2, "1": 3}, {"overall": 1}])
@example([Liar(), Liar()])
@example({"overall": 1.0, OwnText("overall"): 1, OwnText("a"): 2})
@example({"reward": [1, 2], "overall": [3, 4]})
@example({"reward": [1, 2], "x": [Refuses(), 1]})
@example({1: [1], None: [2]})
@pytest.mark.filterwarnings("ignore")  # about complex numbers
def test_any_result_becomes_finite_floats_or_an_error_that_names_the_function(functions, kind, result):
    reward = functions[kind]
    reward.function.__globals__["RESULT"][:] = [result]

    try:
        scores = reward.score(ROWS)
    except ValueError as error:
        assert str(error).startswith(f"`{OPTION}` ({reward})"), str(error)
        return

    assert len(scores) == len(ROWS)
    assert all("overall" in row for row in scores)
    assert {type(key) for row in scores for key in row} == {str}
    assert all(type(value) is float and math.isfinite(value) for row in scores for value in row.values())
    assert pickle.loads(pickle.dumps(scores)) == scores


@pytest.mark.parametrize("kind", ["batch", "sequential", "dataproto"])
@pytest.mark.parametrize(
    "result",
    [
        RefusesToBeShown(),
        {"overall": RefusesToBeShown()},
        [RefusesToBeShown(), 1],
        {"reward": RefusesToBeShown()},
        [{"overall": 1, "a": RefusesToBeShown()}] * 2,
        {"reward": [RefusesToBeShown(), 1]},
    ],
    ids=range(6),
)
def test_a_result_that_cannot_be_shown_is_an_error_all_the_same(functions, kind, result):
    reward = functions[kind]
    reward.function.__globals__["RESULT"][:] = [result]

    with pytest.raises(ValueError) as raised:
        reward.score(ROWS)

    assert str(raised.value).startswith(f"`{OPTION}` ({reward})")
