# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/predicted_step.md hold what the code predicts."""

from pathlib import Path

import pytest

from benchmarks import step_choices
from benchmarks.published_steps import RUNS, hardware_lines, lines, stream_lines

PAGE = Path(__file__).parents[2] / "docs" / "predicted_step.md"


@pytest.mark.slow  # a plan of each published run
def test_the_tables_of_the_page_are_current(tmp_path):
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = [row for row in rows if row.startswith(("| EasyR1", "| verl", "| by hand", "| full", "| LoRA"))]
    streams = [row for row in rows if row.startswith(("| 16 + 16 |", "| 32 + 32 |", "| 64 + 64 |"))]

    assert streams == stream_lines(tmp_path), "run benchmarks/published_steps.py"
    assert shown == [*lines(tmp_path), *hardware_lines(tmp_path)], "run benchmarks/published_steps.py"


@pytest.mark.slow  # eighteen plans
def test_the_table_of_choices_is_current_and_no_choice_makes_a_step_longer(tmp_path):
    rows = step_choices.lines(tmp_path)
    columns = zip(*(map(float, row.strip("| ").split(" | ")[1:]) for row in rows), strict=True)

    assert "\n".join(rows) in PAGE.read_text(), "run benchmarks/step_choices.py"
    assert all(list(seconds) == sorted(seconds, reverse=True) for seconds in columns)


def test_at_least_six_runs_are_held_against_their_source():
    published = [run for run in RUNS if run.source != "by hand"]

    assert len(published) >= 6
    assert {run.source for run in published} == {"EasyR1", "verl"}
