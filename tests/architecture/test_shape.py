# SPDX-License-Identifier: Apache-2.0
"""Ceilings on the shape of the package: a change may lower them, and never raises them.

They hold the core, which a feature does not enter: what its pages import, in modules and lines. A file that
nothing there imports, such as another engine, may come.
"""

import pytest

from tests.architecture.shape import measure

CEILINGS = {
    "percent of the largest room": 14,
    "files over 400 lines": 0,
    "files under 60 lines": 33,
    "files that share a name": 66,
    "longest function": 45,
    "functions that take PPOConfig": 9,
    "lines of README.md": 175,
    "modules below the trainer": 112,
    "lines below the trainer": 19_546,
    "modules below the actor": 58,
    "lines below the actor": 10_113,
    "modules below the data set": 59,
    "lines below the data set": 11_576,
}


@pytest.fixture(scope="module")
def measured():
    return measure()


def test_each_number_has_a_ceiling(measured):
    assert measured.keys() == CEILINGS.keys()


@pytest.mark.parametrize("name", CEILINGS)
def test_no_number_grows_past_its_ceiling(measured, name):
    assert measured[name] <= CEILINGS[name], f"{name}: see python -m tests.architecture.shape"
