# SPDX-License-Identifier: Apache-2.0
"""A reward function is called before a run, as the run would call it."""

import io
import json
import subprocess
import sys
import textwrap

import pytest

from tests.helpers.training import ROOT
from verl.cli.reward_check import main, split_calls


@pytest.fixture
def reward(run, tmp_path):
    """Arguments of a run whose reward file has this source."""

    def write(source):
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(source).lstrip("\n"))
        return [*run, f"worker.reward.reward_function={path}:compute_score"]

    return write


@pytest.fixture
def responses(tmp_path):
    """The switch that names a file of these responses."""

    def write(*entries):
        path = tmp_path / "responses.jsonl"
        path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
        return ["--responses", str(path)]

    return write


def first_answer(folder):
    return json.loads((folder / "train.jsonl").read_text().splitlines()[0])["answer"]


def test_without_a_file_samples_are_made_from_rows_and_labeled_as_samples(run, capsys):
    assert main([*run, "--rows", "2"]) == 0
    text = capsys.readouterr().out

    # A right colour earns 0.9 + 0.1, another one 0.1 for its form, nothing 0: the mean is 1.1 / 3.
    assert "6 responses: samples made from the rows, no model's responses" in text
    assert text.count("ground truth: overall 1  accuracy 1  format 1") == 2
    assert text.count("empty: overall 0  accuracy 0  format 0  ''") == 2
    assert text.count("wrong: overall 0.1  accuracy 0  format 1") == 2
    assert "call 2: 3 responses" in text and "call 3" not in text  # a `batch` function gets a row's at once
    (overall,) = [line.split() for line in text.splitlines() if line.strip().startswith("overall")]
    assert overall == ["overall", "6", "0.366667", "0", "1"]


@pytest.mark.parametrize("given", ["samples", "responses"])
def test_a_text_with_a_lone_surrogate_is_scored(run, folder, responses, tmp_path, capsys, given):
    path = tmp_path / "odd.jsonl"
    lines = (folder / "train.jsonl").read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"answer": "\ud800"}), *lines[1:], ""]))
    own = responses({"response": "\ud800", "row": 0}) if given == "responses" else []

    assert main([*run, f"data.train_files={path}", "--rows", "1", *own]) == 0

    text = capsys.readouterr().out
    assert r"'\ud800'" in text
    text.encode()


def test_a_response_of_several_turns_may_earn_a_reward_for_each(reward, responses, capsys):
    arguments = reward("def compute_score(inputs): return [{'overall': x['tool_rewards']} for x in inputs]")
    line = {"response": "a", "ground_truth": "b", "num_turns": 2, "tool_rewards": [0.5, -1]}

    assert main([*arguments, *responses(line)]) == 0
    assert "line 1: overall -0.5  overall/turn_1 0.5  overall/turn_2 -1" in capsys.readouterr().out
    assert main([*arguments, *responses(line | {"num_turns": 3})]) == 2
    assert "must hold one number for each turn (3, as `num_turns` says)" in capsys.readouterr().out


def test_samples_that_all_score_alike_cause_a_warning(run, capsys):
    # The shipped function for mathematics wants a box around the answer, which no sample has.
    boxed = f"worker.reward.reward_function={ROOT / 'examples/reward_function/math.py'}:compute_score"

    assert main([*run, boxed, "--rows", "1"]) == 0
    assert "all samples score alike" in capsys.readouterr().out
    main([*run, "--rows", "1"])
    assert "all samples score alike" not in capsys.readouterr().out


def test_given_responses_are_scored_with_their_row_or_their_own_columns(run, responses, folder, capsys):
    right = first_answer(folder)
    file = responses(
        {"row": 0, "response": right},
        {"response": "blue", "ground_truth": "blue", "prompt": "which?"},
        {"row": 0, "response": "none"},
    )

    assert main([*run, *file]) == 0
    text = capsys.readouterr().out
    assert f"line 1, row 0: overall 1  accuracy 1  format 1  {right!r}" in text
    assert "line 3, row 0: overall 0  accuracy 0  format 0  'none'" in text
    assert "line 2: overall 1  accuracy 1  format 1  'blue'" in text
    assert text.index("line 3, row 0") < text.index("line 2")  # responses to one row come in one call


IS_COMPLETE = """
def is_complete(response, length, prompt, uid):
    is_long = length == (0 if response == "" else 1)  # the tiny tokenizer has a token for each colour
    return float(is_long and prompt.startswith("<|im_start|>user") and uid != "")


def of_item(item):
    return {"overall": is_complete(item["response"], item["response_length"], item["prompt"], item["uid"])}


"""
CONVENTIONS = {
    "batch": "def compute_score(items):\n    return list(map(of_item, items))",
    "sequential": "def compute_score(item):\n    return of_item(item)",
    "async": "async def compute_score(item):\n    return of_item(item)",
    "dataproto": """
def compute_score(data):
    columns = data.responses, data.response_length, data.prompts, data.uid
    return {"reward": [is_complete(*row) for row in zip(*columns, strict=True)]}
""",
}


@pytest.mark.parametrize(
    ("kind", "num_calls"), [("batch", 2), ("sequential", 6), ("async", 6), ("dataproto", 1)]
)
def test_every_reward_type_is_called_with_the_inputs_of_a_run(kind, num_calls, reward, capsys):
    reward_type = "sequential" if kind == "async" else kind

    assert (
        main([*reward(f"REWARD_TYPE = {reward_type!r}\n{IS_COMPLETE}{CONVENTIONS[kind]}"), "--rows", "2"])
        == 0
    )
    text = capsys.readouterr().out
    assert text.count("\ncall ") == num_calls
    assert text.count(": overall 1  ") == 6


def test_a_call_that_raises_is_reported_with_its_line_and_the_others_continue(reward, responses, capsys):
    arguments = reward("""
        REWARD_TYPE = "sequential"


        def compute_score(item):
            length = 1 / len(item["response"])
            return {"overall": length}
    """)
    file = responses({"row": 1, "response": ""}, {"row": 2, "response": "ab"})

    assert main([*arguments, *file]) == 2
    text = capsys.readouterr().out
    assert "failed for line 1, row 1: it raised ZeroDivisionError: division by zero" in text
    assert "reward.py:5, in compute_score" in text
    assert "line 2, row 2: overall 0.5" in text
    assert "1 of 2 calls failed" in text


def test_invalid_scores_and_calls_over_the_time_limit_are_failures(reward, capsys):
    arguments = reward("""
        import time
        REWARD_TYPE = "sequential"


        def compute_score(item):
            time.sleep(1.2 if item["response"] == "" else 0)
            return {"overall": float("nan") if item["response"] else 0.0}
    """)

    assert main([*arguments, "worker.reward.timeout_s=1", "--rows", "1"]) == 2
    text = capsys.readouterr().out
    assert text.count("`overall` must be a finite number, got nan") == 2
    assert text.count("failed: a run would have ended it after 1 s") == 1
    assert "3 of 3 calls failed" in text


def test_pdb_opens_where_the_call_raised(reward, capsys, monkeypatch):
    arguments = reward("""
        def compute_score(items):
            secret = 6 * 7
            raise KeyError(secret)
    """)
    monkeypatch.setattr("sys.stdin", io.StringIO("p secret + 1\nq\n"))

    assert main([*arguments, "--pdb"]) == 2
    text = capsys.readouterr().out
    assert "(Pdb) 43" in text
    assert "call 2" not in text


@pytest.mark.slow
def test_the_script_stops_at_breakpoints_of_a_file_that_imports_from_the_working_directory(reward, tmp_path):
    arguments = reward("""
        from answers_here import ANSWER

        def compute_score(items):
            breakpoint()
            return [{"overall": ANSWER} for _ in items]
    """)
    (tmp_path / "answers_here.py").write_text("ANSWER = 42.5\n")
    command = [sys.executable, ROOT / "scripts" / "reward_check.py", *arguments]
    done = subprocess.run(
        command, input="p len(items), ANSWER\nq\n", capture_output=True, text=True, cwd=tmp_path
    )

    assert "(Pdb) (3, 42.5)" in done.stdout, done.stderr
    assert done.returncode == 130 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"row": 0}', "it must be an object with `response`, a text"),
        ('{"response": "x"}', "it must have either `row`, a number, or `ground_truth`, got ['response']"),
        ('{"response": "x", "row": 99}', "row 99 must be one of 0 to 7"),
        ('{"response": "x", "row": "one"}', "`row` must be a number, got 'one'"),
    ],
)
def test_a_line_that_cannot_be_used_exits_2_by_its_number(line, reason, run, tmp_path, capsys):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"response": "red", "ground_truth": "red"}\n\n' + line + "\n")

    assert main([*run, "--responses", str(path)]) == 2
    assert f"{path}, line 3: {reason}" in capsys.readouterr().err


def test_a_reward_file_that_is_missing_exits_2(run, capsys):
    assert main([*run, "worker.reward.reward_function=none.py:f"]) == 2
    assert "none.py" in capsys.readouterr().err


def test_responses_are_split_into_calls_as_in_a_run():
    groups = ["a", "a", "b", "b", "b"]

    assert split_calls("sequential", groups, 0) == [[0], [1], [2], [3], [4]]
    assert split_calls("batch", groups, 0) == [[0, 1], [2, 3, 4]]
    assert split_calls("batch", groups, 2) == [[0, 1], [2, 3], [4]]
    assert split_calls("dataproto", groups, 2) == [[0, 1, 2, 3, 4]]
