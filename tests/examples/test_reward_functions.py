# SPDX-License-Identifier: Apache-2.0
"""Every shipped reward function on right, wrong, unformatted and garbage responses, worked out by hand."""

from pathlib import Path

import pytest

from tests.examples.shipped import REWARD_FUNCTIONS, scores_pictures
from tests.helpers.growth import grows_with_length
from tests.helpers.nightly import by_day
from verl.config.worker import RewardConfig
from verl.rewards.function import load_reward_function
from verl.rewards.manager import RewardManager

FOLDER = Path(__file__).parents[2] / "examples" / "reward_function"
GYM_ROW = '{"task": "gcd", "answer": "2", "metadata": {"difficulty": {}}}'
DAPO_KWARGS = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 0.5}


def score(name: str, response: str, ground_truth: str, length: int = 10, **kwargs) -> dict[str, float]:
    reward = load_reward_function(f"{FOLDER / name}.py:compute_score", kwargs)
    (scores,) = reward.score(
        [{"response": response, "ground_truth": ground_truth, "response_length": length}]
    )
    return scores


@pytest.mark.parametrize(
    ("response", "overall", "formatted", "accuracy"),
    [
        (r"<think>1/2</think> So \boxed{\frac{1}{2}}.", 1.0, 1, 1),  # 0.9 + 0.1
        (r"<think>1/2</think> So \boxed{0.25}.", 0.1, 1, 0),
        (r"It is \boxed{0.5}", 0.9, 0, 1),  # no thoughts
        (r"<think>1/2</think> So 0.5", 0.0, 0, 0),  # no box
        (r"<think> \boxed{0.5} and then it never ends", 0.9, 0, 1),
        (r"<think></think>\boxed{", 0.0, 0, 0),
        ("", 0.0, 0, 0),
        ("\x00}}{{ \\boxed garbage \ufffd", 0.0, 0, 0),
    ],
)
def test_math_is_nine_tenths_accuracy_and_one_tenth_format(response, overall, formatted, accuracy):
    scores = score("math", response, "0.5")

    assert scores == pytest.approx({"overall": overall, "format": formatted, "accuracy": accuracy})


@pytest.mark.parametrize(
    ("response", "overall", "formatted", "accuracy"),
    [
        ("<think>I count.</think><answer>3</answer>", 1.0, 1, 1),  # 0.5 + 0.5
        ("<think>I count.</think>\n<answer> 3.0 </answer>\n", 1.0, 1, 1),
        ("<think>I count.</think><answer>4</answer>", 0.5, 1, 0),
        ("<answer>3</answer>", 0.5, 0, 1),
        ("<think>a</think><answer>4</answer> no, <answer>3</answer>", 1.0, 1, 1),  # the last answer counts
        (r"<think>a</think><answer>\boxed{3}</answer>", 1.0, 1, 1),
        ("<think>3</think> 3", 0.0, 0, 0),
        ("3", 0.5, 0, 1),  # without any tags the whole response is the answer
        ("<think>a</think> <answer>3", 0.0, 0, 0),
        ("<think>a</think><answer><answer>3</answer>", 1.0, 1, 1),
        ("<think>Not <answer>4</answer>.</think>\n<answer>\n3\n</answer>", 1.0, 1, 1),
        ("<answer>", 0.0, 0, 0),
        ("", 0.0, 0, 0),
    ],
)
def test_r1v_is_half_accuracy_and_half_format(response, overall, formatted, accuracy):
    assert score("r1v", response, "3") == {"overall": overall, "format": formatted, "accuracy": accuracy}


def test_r1v_takes_a_ground_truth_out_of_its_tags():
    assert score("r1v", "<answer>B</answer>", "<answer> B </answer>")["accuracy"] == 1.0
    assert score("r1v", "<answer>C</answer>", "<answer>B</answer>")["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("answer", "accuracy"),
    [
        ("B", 1.0),
        ("b", 1.0),
        ("(B)", 1.0),
        ("B. The man walks away.", 1.0),
        ("B) The man walks away.", 1.0),
        ("A. The man walks away.", 0.0),
        ("A, B", 0.0),
        ("A. He walks. B. He runs.", 0.0),  # every choice
        ("Bob walks", 0.0),
    ],
)
def test_r1v_reads_a_choice_with_or_without_its_text(answer, accuracy):
    assert score("r1v", f"<think>I look.</think><answer>{answer}</answer>", "B")["accuracy"] == accuracy


@pytest.mark.parametrize(
    ("response", "overall", "accuracy", "formatted", "answered"),
    [
        ("<think>I look.</think><answer>B</answer>", 1.0, 1, 1, 1),  # 0.9 + 0.1
        ("<think>I look.</think>\n<answer>B. He runs</answer>", 1.0, 1, 1, 1),
        ("<answer>Therefore the final answer is: B.</answer>", 0.9, 1, 0, 1),
        ("<think>I look.</think><answer>C</answer>", 0.1, 0, 1, 1),
        ("<think>I look.</think><answer>B or C</answer>", 0.1, 0, 1, 0),
        ("<think>I look.</think><answer>I do not know</answer>", 0.1, 0, 1, 0),
        ("He runs.", 0.9, 1, 0, 1),  # the text of the second choice
        ("(B)", 0.9, 1, 0, 1),
        ("<think>It is B, so the answer is B.", 0.0, 0, 0, 0),  # the length limit ended its thoughts
        ("", 0.0, 0, 0, 0),
    ],
)
def test_choice_is_nine_tenths_the_letter_and_one_tenth_format(
    response, overall, accuracy, formatted, answered
):
    reward = load_reward_function(f"{FOLDER / 'choice'}.py:compute_score", {})
    row = {"response": response, "ground_truth": "<answer>B</answer>", "choices": ["He sits", "He runs"]}

    (scores,) = reward.score([row])

    expected = {"overall": overall, "accuracy": accuracy, "format": formatted, "answered": answered}
    assert scores == pytest.approx(expected)


# A start, a part that is repeated, an end.
ENDLESS = [
    ("<think>", "</think>", ""),
    ("<think>", "</think> <answer>", ""),
    ("<think></think>", "\\boxed{", ""),
    ("<think></think>", "\\boxed{}", "\n"),
    ("<", " ", ""),
    ("<think></think>", " ", ""),
    ("</think>", " ", "<answer" * 10),
    ("<think>", "<answer>", ""),
    ("<think>", "< / think ", ""),
    ("", "a", ""),
]


@pytest.mark.parametrize("name", ["math", "r1v", "dapo", "choice"])
@pytest.mark.parametrize(("start", "part", "end"), ENDLESS)
def test_the_time_of_a_reward_grows_with_the_length_of_the_response_and_not_faster(name, start, part, end):
    kwargs = DAPO_KWARGS if name == "dapo" else {}

    assert grows_with_length(
        lambda response: score(name, response, "B", **kwargs),
        lambda length: start + part * (length // len(part)) + end,
        32_000,  # and four times that: about 32,000 tokens
    )


@pytest.mark.parametrize(
    "response",
    [
        "< think >\n1/2\n< /think >\n\\boxed{0.5}",  # as Qwen2.5-VL-32B writes them
        "\n<think>1/2</think>\\boxed {0.5}",
        "<think>1/2</think> </think> \\boxed{0.5}",
    ],
)
def test_math_reads_tags_and_boxes_with_spaces(response):
    assert score("math", response, "0.5") == {"overall": 1.0, "format": 1.0, "accuracy": 1.0}


def test_r1v_compares_words_as_text():
    assert score("r1v", "<answer>Red</answer>", "red")["accuracy"] == 1.0
    assert score("r1v", "<answer>der</answer>", "red")["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ("So it is.\nAnswer: 1/2", 1.0),
        ("answer : $\\frac{1}{2}$", 1.0),
        ("**Answer: 0.5**", 1.0),
        ("Answer: \\boxed{0.5}", 1.0),
        ("**Answer:** 0.5.", 1.0),
        ("So it is \\boxed{0.5}.", 1.0),  # without the line, the box counts
        ("Answer: 2, not \\boxed{0.5}" + "\nNo.", 1.0),
        ("Answer: 2\nNo.\nAnswer: 0.5", 1.0),
        ("Answer: 2", -1.0),
        ("0.5", -1.0),
        ("Answer: 0.5" + " and so on" * 50, -1.0),  # not at the end
        ("Answer:", -1.0),
        ("", -1.0),
    ],
)
def test_dapo_is_plus_or_minus_one(response, accuracy):
    scores = score("dapo", response, "0.5", **DAPO_KWARGS)

    assert scores == {
        "overall": accuracy,
        "accuracy": accuracy,
        "overlong": 0.0,
        "accuracy_normalized": {1.0: 1.0, -1.0: 0.0}[accuracy],
    }


@pytest.mark.parametrize(
    ("length", "overlong"),
    # Free up to 100 - 20 = 80 tokens, then 1/20 less for each.
    [(10, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (150, -1.0)],
)
def test_dapo_charges_for_the_end_of_the_length_budget(length, overlong):
    scores = score("dapo", "Answer: 5", "5", length=length, **DAPO_KWARGS)

    assert scores["overlong"] == pytest.approx(overlong)
    assert scores["overall"] == pytest.approx(1.0 + 0.5 * overlong)


# Judges need a server (tests/rewards/graders), `code` tests (test_code_reward.py), `by_source` functions,
# and others pictures.
NO_RULES = ("llm_judge", "judged", "code", "by_source")
RULES = [path for path in REWARD_FUNCTIONS if path.stem not in NO_RULES and not scores_pictures(path)]


@pytest.mark.parametrize(
    "path",
    by_day(RULES, *(path for path in RULES if path.stem == "math"), paths=["verl/rewards", "examples"]),
    ids=lambda path: path.stem,
)
def test_every_reward_function_scores_in_the_pool(path):
    kwargs = DAPO_KWARGS if path.stem == "dapo" else {}
    responses = [r"<think>a</think><answer>2</answer> \boxed{2} Answer: 2", "9^{9^{9}}", ""]
    truth = GYM_ROW if path.stem == "reasoning_tasks" else "2"
    inputs = [
        {"prompt": "1 + 1?", "response": r, "response_length": 5, "ground_truth": truth} for r in responses
    ]
    config = RewardConfig(reward_function=f"{path}:compute_score", reward_function_kwargs=kwargs)

    with RewardManager(config) as manager:
        job = manager.start()
        job.submit([0, 1, 2], inputs)
        scores = job.result()

    assert manager.name == path.stem
    assert scores["accuracy"] == ([1.0, -1.0, -1.0] if path.stem == "dapo" else [1.0, 0.0, 0.0])


BY_SOURCE = {
    "maths": f"{FOLDER / 'math.py'}:compute_score",
    "choice": f"{FOLDER / 'choice.py'}:compute_score",
}


def by_source(**options):
    column = options.get("column", "source")
    reward = load_reward_function(
        f"{FOLDER / 'by_source.py'}:compute_score", {"functions": BY_SOURCE} | options
    )
    rows = [("choice", "(B)", "B"), ("maths", r"\boxed{7}", "7"), ("choice", "(A)", "B"), ("maths", "7", "8")]
    return reward.score(
        [
            {column: source, "prompt": "?", "response": text, "response_length": 3, "ground_truth": truth}
            for source, text, truth in rows
        ]
    )


@pytest.mark.parametrize("column", ["source", "data_source"])
def test_each_response_is_scored_by_the_function_of_its_source(column):
    scores = by_source(column=column)

    assert [score["accuracy"] for score in scores] == [1.0, 1.0, 0.0, 0.0]
    maths = load_reward_function(BY_SOURCE["maths"])
    assert (
        scores[1].keys()
        == maths.score(
            [{"prompt": "?", "response": r"\boxed{7}", "response_length": 3, "ground_truth": "7"}]
        )[0].keys()
    )


def test_a_source_without_a_reward_function_is_named():
    with pytest.raises(ValueError, match=r"must have the sources \['choice'\] of `source`, has \['maths'\]"):
        by_source(functions={"maths": BY_SOURCE["maths"]})
