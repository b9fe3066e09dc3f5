# SPDX-License-Identifier: Apache-2.0
"""Queries over runs of a few rows, against results worked out by hand."""

import csv
import io
import json

import pytest

from tests.helpers.rollouts import rollout, with_media
from verl.viewer.queries import RolloutQuery, exported, neighbors, page, prompt_history, select, with_prompts
from verl.viewer.rollout_index import conversation, distinct_starts
from verl.viewer.rollout_store import RolloutStore
from verl.viewer.runs import RunFolder

LONG = "Answer with one word and nothing else, in lower case. "


def messages(*turns):
    return json.dumps([{"role": role, "content": content} for role, content in turns])


@pytest.fixture
def runs(tmp_path):
    """A run of two training steps and two validations, which ask the same two questions."""
    store = RolloutStore(tmp_path / "first")
    media = with_media(tmp_path / "first")
    for step in (1, 2):
        rows = [
            rollout(step, group, sample, messages=messages(("user", f"{LONG}Is {step}{group} even?")))
            for group in range(2)
            for sample in range(2)
        ]
        store.write(step, rows)
        asked = [
            rollout(step, 0, sample, prompt=LONG, score=step + sample / 2, **shown)
            | {"group": f"val{step}-{row}"}
            for row, shown in enumerate([{}, media])
            for sample in range(2)
        ]
        store.write(step, asked, "validation")
    return [RunFolder(tmp_path / "first", "first")]


def query(text="", num_runs=1):
    return RolloutQuery.from_params([tuple(part.split("=")) for part in text.split("&") if part], num_runs)


def test_rows_of_training_and_validation_are_told_apart(runs):
    counts = {
        kind: select(runs, query(f"run=0{kind}")).num_rows
        for kind in ("", "&kind=train", "&kind=validation", "&kind=validation&step_min=2", "&media=yes")
    }

    assert [*counts.values()] == [16, 8, 8, 4, 4]


def test_bounds_are_inclusive_for_scores_that_are_no_binary_fractions(tmp_path):
    RolloutStore(tmp_path).write(
        1, [rollout(1, 0, sample, score=score) for sample, score in enumerate([0.2, 0.7, 0.9])]
    )
    runs = [RunFolder(tmp_path, "first")]

    for text, expected in (("score_min=0.9", 1), ("score_max=0.2", 1), ("score_min=0.7&score_max=0.7", 1)):
        assert select(runs, query(f"run=0&{text}")).num_rows == expected, text
    assert select(runs, query("run=0&score_max=1e300&step_min=0.5")).num_rows == 3


def test_a_repeated_validation_replaces_its_own_rows_alone(runs):
    runs[0].rollouts.refresh()
    RolloutStore(runs[0].folder).write(1, [rollout(1, 0, 0) | {"group": "val1-0"}], "validation")

    table = runs[0].rollouts.refresh().to_pylist()

    assert [row["step"] for row in table if row["kind"] == "validation"] == [2, 2, 2, 2, 1]
    assert len([row for row in table if row["kind"] == "train"]) == 8


def test_rows_show_what_tells_their_prompts_apart_and_the_first_image(runs):
    chosen = query("run=0&kind=train&limit=4")
    rows = with_prompts(runs, page(select(runs, chosen), chosen)["rows"])

    assert [row["question"] for row in rows] == ["… lower case. Is 10 even?"] * 2 + [
        "… lower case. Is 11 even?"
    ] * 2
    assert {row["thumbnail"] for row in rows} == {None}
    chosen = query("run=0&kind=validation&media=yes")
    (row, *_) = with_prompts(runs, page(select(runs, chosen), chosen)["rows"])
    assert (runs[0].folder / "rollouts/media" / row["thumbnail"]).is_file()
    assert row["question"] == LONG.strip()  # one prompt has nothing to differ from


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (messages(("system", "Be brief."), ("user", "2 + 2?")), "2 + 2?"),
        (messages(("system", "Be brief.")), "Be brief."),
        (messages(("user", "a"), ("assistant", "b"), ("user", "c")), "a\nb\nc"),
        (messages(("user", [{"type": "image"}, {"type": "text", "text": "Which?"}])), "Which?"),
        ("[[", None),
        ("3", None),
        ('[{"role": "user"}]', None),
        ('["user"]', None),
        (None, None),
    ],
)
def test_a_conversation_is_read_without_its_template(stored, expected):
    assert conversation(stored) == expected


def test_a_short_common_start_stays():
    assert distinct_starts(["What is 1 + 1?", "What is 2 + 2?"]) == ["What is 1 + 1?", "What is 2 + 2?"]
    assert distinct_starts([]) == []


def test_neighbors_are_the_groups_in_the_order_of_the_rows(runs):
    chosen = query("run=0&kind=validation&sort=score&order=down")
    table = select(runs, chosen)

    # By score: step 2 with 2.5 (val2-0, val2-1) and 2.0, then step 1 with 1.5 and 1.0.
    first, second, third = (
        neighbors(table, chosen, (0, "validation", step, group))
        for step, group in ((2, "val2-0"), (2, "val2-1"), (1, "val1-0"))
    )
    assert first == {
        "position": 1,
        "total": 4,
        "previous": None,
        "next": {"run": 0, "kind": "validation", "step": 2, "group": "val2-1"},
    }
    assert (second["position"], second["previous"]["group"], second["next"]["group"]) == (
        2,
        "val2-0",
        "val1-0",
    )
    assert (third["position"], third["next"]["group"]) == (3, "val1-1")


def test_a_group_that_the_filters_leave_out_has_no_neighbors(runs):
    chosen = query("run=0&kind=train")

    found = neighbors(select(runs, chosen), chosen, (0, "validation", 2, "val2-0"))

    assert found == {"position": None, "total": 4, "previous": None, "next": None}


def test_one_prompt_is_followed_over_the_steps_with_its_own_media(runs):
    table = runs[0].rollouts.same_prompt("validation", 2, "val2-1")

    history = prompt_history(table)

    assert [(one["step"], one["group"], one["mean"], one["min"], one["max"]) for one in history] == [
        (1, "val1-1", 1.25, 1.0, 1.5),
        (2, "val2-1", 2.25, 2.0, 2.5),
    ]
    assert [[row["sample"] for row in one["rows"]] for one in history] == [[0, 1], [0, 1]]


def test_responses_without_a_score_count_in_no_mean():
    import pyarrow as pa

    rows = [
        {"kind": "train", "step": 1, "group": "a", "sample": 1, "score": None},
        {"kind": "train", "step": 1, "group": "a", "sample": 0, "score": 0.5},
        {"kind": "train", "step": 0, "group": "b", "sample": 0, "score": None},
    ]
    history = prompt_history(pa.Table.from_pylist(rows))

    assert [(one["step"], one["mean"], one["min"], one["max"]) for one in history] == [
        (0, None, None, None),
        (1, 0.5, 0.5, 0.5),
    ]
    assert [row["sample"] for row in history[1]["rows"]] == [0, 1]


def test_json_lines_have_the_values_of_the_rows_that_pass(runs):
    lines = "".join(exported(runs, select(runs, query("run=0&kind=validation&score_min=2.5")), "jsonl"))

    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(row["run"], row["kind"], row["step"], row["group"], row["sample"]) for row in rows] == [
        ("first", "validation", 2, "val2-0", 1),
        ("first", "validation", 2, "val2-1", 1),
    ]
    assert rows[0]["prompt"] == LONG and rows[0]["reward_values"] == {"overall": 0.0, "format": 1.0}
    assert rows[1]["media"][0]["source"] == "shapes/7.png" and "token_ids" not in rows[0]


def test_a_table_for_spreadsheets_holds_no_formula(tmp_path):
    formulas = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", '\t=1, "quoted"\n', "a line\nanother"]
    rows = [rollout(1, 0, sample, response=text, score=-2.0) for sample, text in enumerate(formulas)]
    RolloutStore(tmp_path).write(1, rows)
    run = RunFolder(tmp_path, "=run")

    text = "".join(exported([run], select([run], query("run=0")), "csv"))

    read = [*csv.DictReader(io.StringIO(text, newline=""))]
    assert [row["response"] for row in read] == [f"'{one}" for one in formulas[:5]] + [formulas[5]]
    assert {row["score"] for row in read} == {"-2.0"} and {row["run"] for row in read} == {"'=run"}
    assert json.loads(read[0]["reward_values"]) == {"overall": 1.0, "format": 1.0}
