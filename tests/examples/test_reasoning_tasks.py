# SPDX-License-Identifier: Apache-2.0
"""Rows of reasoning-gym and their scores."""

import json

import pytest

from examples.data_preprocess.reasoning_tasks import main
from examples.reward_function.reasoning_tasks import compute_score

TASKS = ["chain_sum", "gcd", "spell_backward", "leg_counting", "simple_equations", "letter_counting"]


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    assert main([*TASKS, "--output", str(folder), "--rows", "20", "--val-rows", "5"]) == 0
    return folder


def test_each_task_has_as_many_rows_and_no_question_is_in_both_files(folder):
    train, val = rows_of(folder, "train"), rows_of(folder, "val")

    for rows, count in ((train, 20), (val, 5)):
        assert {task: sum(row["task"] == task for row in rows) for task in TASKS} == dict.fromkeys(
            TASKS, count
        )
    problems = [row["problem"] for row in train + val]
    assert len(set(problems)) == len(problems)


def test_a_task_that_is_named_twice_repeats_no_question(tmp_path):
    assert main(["gcd", "gcd", "--output", str(tmp_path), "--rows", "20", "--val-rows", "5"]) == 0

    problems = [row["problem"] for name in ("train", "val") for row in rows_of(tmp_path, name)]
    assert len(set(problems)) == len(problems) == 50


def test_the_same_seed_gives_the_same_files_and_another_one_others(folder, tmp_path):
    for seed in ("1", "2"):
        arguments = [*TASKS, "--rows", "20", "--val-rows", "5", "--seed", seed]
        assert main([*arguments, "--output", str(tmp_path / seed)]) == 0

    assert rows_of(tmp_path / "1", "train") == rows_of(folder, "train")
    assert rows_of(tmp_path / "2", "train") != rows_of(folder, "train")


def test_right_answers_score_1_alone_or_in_tags_and_wrong_ones_less(folder):
    rows = rows_of(folder, "val")
    rights = [json.loads(row["answer"])["answer"] for row in rows]
    responses = [
        [
            {"response": form.format(right), "ground_truth": row["answer"]}
            for row, right in zip(rows, rights, strict=True)
        ]
        for form in (
            " {} \n",
            "I guess <answer>7</answer>. No: <answer> {} </answer>",
            "no idea",
            "{}<answer></answer>",
        )
    ]

    alone, in_tags, wrong, empty = (compute_score(each) for each in responses)

    assert alone == in_tags == [{"overall": 1.0, "accuracy": 1.0}] * len(rows)
    assert all(score["overall"] < 1 and score["accuracy"] == 0 for score in wrong + empty)


@pytest.mark.parametrize(
    ("find", "answer", "response"),
    [
        ("number", "12", "7 + 5 is 12."),
        ("number", "-3", "It is 4 - 7 = -3"),
        ("word", "Yes", "The answer is: Yes."),
    ],
)
def test_the_last_number_or_word_of_a_sentence_may_be_the_answer(find, answer, response):
    task = {"number": "chain_sum", "word": "syllogism"}[find]
    truth = json.dumps({"task": task, "answer": answer, "metadata": {}})
    inputs = [
        {"response": text, "ground_truth": truth} for text in (response, "", f"<answer>{answer}</answer>")
    ]

    assert [score["accuracy"] for score in compute_score(inputs, find=find)] == [1.0, 0.0, 1.0]
    assert compute_score(inputs)[0]["accuracy"] == 0.0


def test_an_unknown_way_to_find_the_answer_is_refused():
    with pytest.raises(ValueError, match=r"`find` must be one of \['number', 'word'\], got 'digit'"):
        compute_score([], find="digit")


def test_options_of_a_task_are_those_of_reasoning_gym(tmp_path):
    assert main(["chain_sum:min_terms=5,max_terms=5", "--output", str(tmp_path), "--rows", "9"]) == 0

    terms = [json.loads(row["answer"])["metadata"]["num_terms"] for row in rows_of(tmp_path, "train")]
    assert terms == [5] * 9


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("chain_sums", "no task 'chain_sums'; did you mean 'chain_sum'?"),
        ("chain_sum:max_terms=x", "'max_terms=x' is no option of a task"),
        ("chain_sum:terms=4", "unexpected keyword argument 'terms'"),
        ("gcd:foo=3", "the options are ['max_numbers', 'max_value', 'min_numbers', 'min_value']"),
        ("gcd:size=-1", "the switches set `size` by `--rows` and `--val-rows`, `seed` by `--seed`"),
        ("gcd:min_value=2,seed=4", "gcd:min_value=2,seed=4: the switches set `size` by"),
        ("chain_sum:min_terms=40", "chain_sum:min_terms=40: "),
        ("graph_color", "its answers cannot be scored from a file"),
        ("coin_flip", "different questions among 2200: ask for fewer rows"),
    ],
    ids=["name", "value", "option", "options", "size", "seed", "range", "unscorable", "too few"],
)
def test_a_task_that_cannot_be_is_one_error_and_writes_nothing(tmp_path, capsys, task, message):
    assert main(["gcd", task, "--output", str(tmp_path / "out")]) == 2

    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["file", "file/tasks", "/proc/tasks", "taken"])
def test_an_output_that_cannot_be_written_is_one_error(tmp_path, capsys, output):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "train.jsonl" / "mine").mkdir(parents=True)

    assert main(["gcd", "--rows", "2", "--val-rows", "2", "--output", str(tmp_path / output)]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and (output == "taken" or "`--output` must be a folder" in line)


@pytest.mark.parametrize(
    ("count", "rule"), [("two", "invalid integer value: 'two'"), ("0", "must be at least 1, got 0")]
)
def test_a_number_of_rows_is_an_integer_from_1(capsys, count, rule):
    with pytest.raises(SystemExit):
        main(["gcd", "--output", "out", "--val-rows", count])

    assert f"argument --val-rows: {rule}" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["2", "x = 2", '{"task": "gcd"}', "[1]"])
def test_a_row_of_other_data_names_the_program_that_writes_the_rows(answer):
    with pytest.raises(ValueError, match="is not that of a reasoning-gym row; write the rows with"):
        compute_score([{"response": "2", "ground_truth": answer}])
