# SPDX-License-Identifier: Apache-2.0
"""The table of faults: rows in one order, each written alone."""

import pytest

from tests.faults.table import BEGIN, END, FAULTS, PAGE, Row, rows_of, write_row

EARLY, LATE = "a worker raises", "a gradient is not finite"


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    return path


def test_a_row_replaces_that_of_its_fault_and_the_order_is_that_of_the_list(page):
    write_row(LATE, Row(0, 1.0, 2.0), page)
    write_row(EARLY, Row(2, 0.04, 30.26), page)
    write_row(LATE, Row(None, 3.0, None), page)

    rows = rows_of(page.read_text())
    assert list(rows) == [EARLY, LATE]
    assert rows[EARLY].endswith("| 2 | 0.0 s | 30.3 s |")
    assert rows[LATE].endswith("|  | 3.0 s |  |")
    assert page.read_text().startswith("before\n") and page.read_text().endswith(f"{END}\nafter\n")


def test_a_fault_that_is_not_in_the_list_is_refused(page):
    with pytest.raises(KeyError):
        write_row("an earthquake", Row(0, 0.0, 0.0), page)


def test_a_page_without_a_place_for_the_table_is_refused(page):
    page.write_text("nothing")

    with pytest.raises(ValueError, match="must hold the lines"):
        write_row(LATE, Row(0, 1.0, 2.0), page)


def test_the_page_has_a_row_for_every_fault():
    assert list(rows_of(PAGE.read_text())) == list(FAULTS)
