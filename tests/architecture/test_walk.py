# SPDX-License-Identifier: Apache-2.0
"""A newcomer can read the way from the command to `train_step`: few files, listed in order on a page.

`tests/trainer/test_training.py` compares the page with the files that a run passes.
"""

from tests.architecture.source import ROOT
from tests.architecture.walk import END, STATIONS, rows_of_page

MAX_FILES = 12


def test_the_walk_is_short():
    files = [row.file for row in rows_of_page()]

    assert 0 < len(files) <= MAX_FILES
    assert len({*files}) == len(files)


def test_each_station_is_a_function_of_its_file():
    for station in (*STATIONS, END):
        file, colon, name = station.partition(":")
        assert not colon or f"def {name.rpartition('.')[2]}(" in (ROOT / file).read_text(), station
