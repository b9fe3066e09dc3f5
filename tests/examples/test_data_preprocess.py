# SPDX-License-Identifier: Apache-2.0
"""Rows of public data sets are converted to rows of this project."""

import pytest

from examples.data_preprocess.common import COLUMN_TYPES
from scripts.convert_data import DATA_SETS
from verl.data.bad_rows import BadRowError
from verl.sandbox.cases import read_cases

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form"
    " Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def convert(name, row):
    return DATA_SETS[name].converted(row)


def dapo_row(content, ground_truth="34", index="9a9b"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": ground_truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def longvideo_row(**columns):
    row = {"problem_id": 7, "problem": "Why?\nA. No.\nB. Yes.", "data_type": "video", "problem_type": "goal"}
    told = {"reasoning": "They run. So B.", "videos": "longvila_videos/a.mp4", "answer": "<answer>B</answer>"}
    return row | told | columns


def video_mme_row(**columns):
    row = {
        "video_id": "001", "duration": "short", "domain": "Knowledge", "sub_category": "Humanity & History",
        "url": "https://example.org/watch?v=fFjv93ACGo8", "videoID": "fFjv93ACGo8", "question_id": "001-1",
        "task_type": "Counting Problem", "question": "How many?", "options": ["A. One.", "B. Two."],
        "answer": "B",
    }  # fmt: skip
    return row | columns


def skywork_row(ability="math", truth='["34"]', **difficulty):
    return {
        "data_source": "train-math-deepscaler",
        "prompt": [{"content": "How many?", "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {
            "index": 0,
            "model_difficulty": {f"DeepSeek-R1-Distill-Qwen-{size}": 4 for size in ("1.5B", "7B", "32B")}
            | difficulty,
        },
    }


def livecodebench_row(**columns):
    row = {
        "question_content": "Add the numbers.", "starter_code": "", "contest_date": "2025-01-11T00:00:00",
        "question_id": "abc_a", "metadata": "{}", "private_test_cases": [],
        "public_test_cases": '[{"input": "1 2", "output": "3", "testtype": "stdin"}]',
    }  # fmt: skip
    return row | columns


@pytest.mark.parametrize(
    ("ability", "truth", "answer"),
    [
        ("math", '["\\\\frac{1}{2}"]', r"\frac{1}{2}"),
        ("math", "34", "34"),
        ("math", "x + 1", "x + 1"),
        (
            "code",
            '{"assert_case": ["assert f(1) == 2"], "inputs": null}',
            '{"assert_case": ["assert f(1) == 2"]}',
        ),
    ],
)
def test_skyworks_answers_are_texts_and_tests(ability, truth, answer):
    row = convert("skywork_or1_7b", skywork_row(ability, truth))

    assert (row["problem"], row["answer"], row["level"]) == ("How many?", answer, 4)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (skywork_row(**{"DeepSeek-R1-Distill-Qwen-7B": 0}), "7B answers it always"),
        (skywork_row(**{"DeepSeek-R1-Distill-Qwen-7B": 16}), "7B answers it never"),
        (
            skywork_row(**{"DeepSeek-R1-Distill-Qwen-7B": None}),
            "no difficulty for DeepSeek-R1-Distill-Qwen-7B",
        ),
        (skywork_row(truth='["1", "2"]'), "several right answers"),
        (skywork_row() | {"prompt": [{"role": "system", "content": "?"}] * 2}, "not one message of the user"),
    ],
)
def test_skyworks_rows_that_teach_the_model_nothing_are_left_out(row, reason):
    with pytest.raises(BadRowError, match=reason):
        convert("skywork_or1_7b", row)


def test_livecodebench_asks_for_a_program_and_keeps_the_tests():
    plain = convert("livecodebench", livecodebench_row())
    starter = convert("livecodebench", livecodebench_row(starter_code="class Solution:\n    def f(self):\n"))

    assert plain["problem"].startswith("Add the numbers.\n\nRead the input from stdin")
    assert "```python\nclass Solution:\n    def f(self):\n```" in starter["problem"]
    assert plain["sub_category"] == "2025-01" and "livecodebench" in plain["data_source"]
    assert [(case.stdin, case.stdout) for case in read_cases(plain["answer"])] == [("1 2", "3")]


def test_video_mme_keeps_the_categories_and_lists_the_choices():
    assert convert("video_mme", video_mme_row()) == {
        "problem": "<video>How many?\nA. One.\nB. Two.",
        "answer": "B",
        "videos": ["data/fFjv93ACGo8.mp4"],
        "choices": ["One.", "Two."],
        "duration": "short",
        "domain": "Knowledge",
        "sub_category": "Humanity & History",
        "task_type": "Counting Problem",
        "id": "001-1",
        "data_source": "lmms-lab/Video-MME",
    }


def test_longvideo_reason_shows_the_video_and_joins_reasoning_and_answer_to_a_response():
    assert convert("longvideo_reason", longvideo_row()) == {
        "problem": "<video>Why?\nA. No.\nB. Yes.",
        "answer": "B",
        "videos": ["longvila_videos/a.mp4"],
        "response": "<think>They run. So B.</think><answer>B</answer>",
        "subject": "goal",
        "id": "7",
        "data_source": "LongVideo-Reason/longvideo-reason",
    }


def test_longvideo_reason_without_reasoning_has_no_response_and_with_tags_the_same_one():
    without = convert("longvideo_reason", longvideo_row(reasoning=None))
    tagged = convert("longvideo_reason", longvideo_row(reasoning="<think>\nThey run. So B.\n</think>"))

    assert "response" not in without and without["answer"] == "B"
    assert tagged == convert("longvideo_reason", longvideo_row())


def test_gsm8k_takes_the_result_without_commas_and_the_solution_without_calculations():
    answer = "48/2 = <<48/2=24>>24 thousand.\nTogether <<48000+24000=72000>>72,000.\n#### 72,000"

    row = convert("gsm8k", {"question": "How many?", "answer": answer})

    assert row == {
        "problem": "How many?",
        "answer": "72000",
        "solution": "48/2 = 24 thousand.\nTogether 72,000.",
        "data_source": "openai/gsm8k",
    }


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"First $\boxed{1}$, no: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"The answer is $\fbox{7}$.", "7"),
        (r"So $\boxed 5$.", "5"),
    ],
)
def test_math_takes_the_last_box_in_every_notation_of_the_solutions(solution, answer):
    row = {"problem": "p", "solution": solution, "level": "Level 3", "type": "Algebra"}

    converted = convert("math", row)

    assert (converted["answer"], converted["level"], converted["subject"]) == (answer, 3, "Algebra")


def test_math_prefers_the_answer_column_and_reads_numbers_as_levels():
    row = {"problem": "p", "solution": r"\boxed{1}", "answer": "2", "subject": "Algebra", "level": 5}

    converted = convert("math", row | {"unique_id": "test/algebra/1.json"})

    assert (converted["answer"], converted["level"], converted["id"]) == ("2", 5, "test/algebra/1.json")


def test_math_without_a_level_has_none():
    row = {"problem": "p", "solution": r"\boxed{1}", "level": "Level ?", "type": "Geometry"}

    assert "level" not in convert("math", row)


def test_dapo_removes_its_instructions_and_nothing_else():
    problem = "Let $a=1$.\n\nRemember that $b=2$. Find $a+b$."

    row = convert("dapo17k", dapo_row(DAPO_PROMPT.format(problem)))

    assert row == {
        "problem": problem,
        "answer": "34",
        "ability": "MATH",
        "id": "9a9b",
        "data_source": "math_dapo",
    }


def test_dapo_keeps_a_prompt_that_has_no_instructions():
    assert convert("dapo17k", dapo_row("What is 2 + 3?"))["problem"] == "What is 2 + 3?"


@pytest.mark.parametrize("tags", ["{}", "<answer> {} </answer>"])
@pytest.mark.parametrize("name", ["clevr", "geoqa8k"])
def test_answers_are_the_same_with_and_without_tags(name, tags):
    image = {"bytes": b"png", "path": None}

    tagged = convert(name, {"image": image, "problem": "How many?", "solution": tags.format("145°")})
    listed = convert(name, {"images": [image], "problem": "<image>How many?", "answer": "145°"})

    assert tagged == listed
    assert (tagged["problem"], tagged["answer"]) == ("<image>How many?", "145°")


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("gsm8k", {"question": "q", "answer": "72"}, "no result behind ####"),
        ("gsm8k", {"question": "q", "answer": "72\n#### "}, "the answer is empty"),
        ("gsm8k", {"question": None, "answer": "#### 1"}, "`question` must be text, got NoneType"),
        ("math", {"problem": "p", "solution": "obvious"}, r"no \boxed{}"),
        ("math", {"problem": " ", "answer": "1"}, "the problem is empty"),
        ("dapo17k", dapo_row(DAPO_PROMPT.format("p").partition("Remember")[0]), "half of the instructions"),
        ("dapo17k", dapo_row("p") | {"prompt": []}, "not one message of the user"),
        ("dapo17k", dapo_row("p") | {"reward_model": None}, "`ground_truth` must be text"),
        ("geometry3k", {"images": [b"1"], "problem": "<image><image>?", "answer": "1"}, "2 <image> but"),
        ("clevr", {"images": None, "problem": "?", "answer": "1"}, "no image"),
        ("clevr", {"images": [b"1"], "problem": "?", "answer": 1.5}, "`answer` must be text, got float"),
        ("video_mme", video_mme_row(answer="C"), "must be the letter of one of 2 options"),
        ("video_mme", video_mme_row(options=["B. One.", "A. Two."]), "option A is lettered B"),
        ("video_mme", video_mme_row(options="A. One."), "`options` must be a list of texts"),
        ("longvideo_reason", longvideo_row(videos=[]), "must be the path of a video, or a list"),
        ("longvideo_reason", longvideo_row(reasoning="x</think>y"), "contains tags of the response format"),
    ],
)
def test_an_unusable_row_gives_the_reason(name, row, reason):
    with pytest.raises(BadRowError, match=reason.replace("\\", r"\\").replace("{}", r"\{\}")):
        convert(name, row)


def test_every_converted_column_has_a_type():
    image = {"bytes": b"png", "path": None}
    rows = {
        "gsm8k": {"question": "q", "answer": "#### 1"},
        "math": {"problem": "p", "solution": r"\boxed{1}", "level": "Level 1", "type": "t", "unique_id": "i"},
        "dapo17k": dapo_row("p"),
        "geometry3k": {
            "images": [image],
            "problem": "<image>",
            "answer": "1",
            "id": 3,
            "choices": ["1", "2"],
        },
        "clevr": {"images": [image], "problem": "<image>", "answer": "1"},
        "geoqa8k": {"images": [image], "problem": "<image>", "answer": "1"},
        "longvideo_reason": longvideo_row(),
        "video_mme": video_mme_row(),
        "livecodebench": livecodebench_row(),
        **dict.fromkeys(("skywork_or1_1p5b", "skywork_or1_7b", "skywork_or1_32b"), skywork_row()),
    }

    assert sorted(rows) == sorted(DATA_SETS)
    assert set(COLUMN_TYPES) == {column for name, row in rows.items() for column in convert(name, row)}
