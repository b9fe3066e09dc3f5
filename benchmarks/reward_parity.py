# SPDX-License-Identifier: Apache-2.0
r"""Score 500 responses per reward with another repository's reward files and ours, and list the differences.

The responses combine answers with forms around them, so what is right is known.

    pip install mathruler pylatexenc math-verify
    git clone https://github.com/hiyouga/EasyR1 /tmp/EasyR1
    python benchmarks/reward_parity.py /tmp/EasyR1
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parents[1]
NUM_RESPONSES = 500
DAPO = {"max_response_length": 2048, "overlong_buffer_length": 512, "overlong_penalty_factor": 1.0}

# Kind, ground truth, right answers, wrong answers.
ANSWERS = [
    ("integers", "42", ["42", "42.0", "$42$"], ["24", "420"]),
    ("fractions", r"\frac{1}{2}", ["0.5", "1/2", r"\dfrac{1}{2}", r"\frac{2}{4}"], ["0.25", "2"]),
    ("expressions", r"3\sqrt{13}", [r"3 \sqrt{13}", r"\sqrt{117}"], [r"13\sqrt{3}"]),
    ("expressions", "x^2-1", ["(x-1)(x+1)", "f(x)=x^2-1"], ["x^2+1"]),
    ("sets and intervals", r"\{1,2\}", [r"\{2,1\}", "1, 2"], ["1", r"\{1,3\}"]),
    ("sets and intervals", "[2,5)", ["[2, 5)", r"2 \le x < 5"], ["[2,5]", "(2,5)"]),
    ("units", r"5\text{ cm}", ["5 cm", r"5\,\mathrm{cm}"], [r"5\text{ m}", "6 cm"]),
    ("units", "12", ["12 apples", r"12\text{ apples}", "12 square units"], ["13 apples"]),
    ("units", "18", [r"\$18", "18 dollars"], [r"\$81"]),
    ("degrees", "30", ["30°", r"30^\circ", "30 degrees"], ["60°"]),
    ("percent", r"25\%", [r"25\%", "0.25", "25 percent"], [r"2.5\%"]),
    ("symbols", r"\sqrt{2}", ["√2", r"\sqrt2"], ["√3"]),
    (
        "small numbers",
        r"9.1\times10^{-31}",
        ["9.1e-31", r"9.10 \times 10^{-31}"],
        [r"1.6\times10^{-19}", "0"],
    ),
    ("choices", "B", ["B", "(B)", "b", "B. The man walks away."], ["C", "A, B", "A. The man walks away."]),
    ("words", r"\text{Evelyn}", ["Evelyn", r"\textbf{Evelyn}"], ["Angela"]),
    ("words", "Yes", ["yes", r"\text{Yes}", "Yes."], ["No"]),
    ("words", "on", ["On"], ["no"]),
    ("words", "The man opens the door", ["the man opens the door."], ["The man closes the door"]),
    ("two answers in one", "5", ["5"], [r"7 \text{ (or } 5)", "5 or 6"]),
]

# Name, response with `@` for the answer and `~` for another one, whether the answer counts, format.
FORMS = {
    "math": [
        ("plain", r"<think>I compute.</think> The answer is \boxed{@}.", 1, 1),
        ("spaces in tags", "< think >\nI compute.\n< /think >\n\\boxed{@}", 1, 1),
        ("no thoughts", r"The answer is \boxed{@}.", 1, 0),
        ("no box", "<think>I compute.</think> The answer is @.", 0, 0),
        ("`\\boxed {}`", r"<think>I compute.</think> \boxed {@}", 1, 1),
        ("nested boxes", r"<think>I compute.</think> \boxed{\boxed{@}}", 1, 1),
        ("two boxes", r"<think>Perhaps \boxed{~}?</think> No: \boxed{@}.", 1, 1),
        ("cut box", r"<think>I compute.</think> So it is \boxed{@", 1, 0),
        ("cut second box", r"<think>I compute.</think> \boxed{@}. To check: \boxed{", 1, 1),
        ("box in dollars", "<think>I compute.</think>\n$$\\boxed{@}$$\n", 1, 1),
        ("box in the thoughts", r"<think>It is \boxed{@}.</think> Done.", 1, 0),
        ("leading space", "\n<think>I compute.</think>\\boxed{@}", 1, 1),
    ],
    "r1v": [
        ("plain", "<think>I look.</think><answer>@</answer>", 1, 1),
        ("lines", "<think>\nI look.\n</think>\n<answer>\n@\n</answer>", 1, 1),
        ("trailing line", "<think>I look.</think>\n<answer> @ </answer>\n", 1, 1),
        ("no tags", "@", 1, 0),
        ("no thoughts", "<answer>@</answer>", 1, 0),
        ("no answer tag", "<think>I look.</think> @", 0, 0),
        ("tag in the thoughts", "<think>Not <answer>~</answer>.</think><answer>@</answer>", 1, 1),
        ("two answers", "<think>I look.</think><answer>~</answer> No: <answer>@</answer>", 1, 1),
        ("tag twice", "<think>I look.</think><answer><answer>@</answer>", 1, 1),
        ("cut answer", "<think>I look.</think><answer>@", 0, 0),
        ("box in the answer", r"<think>I look.</think><answer>\boxed{@}</answer>", 1, 1),
        ("ground truth with tags", "<think>I look.</think> <answer>@</answer>", 1, 1),
    ],
    "dapo": [
        ("plain", "I compute.\nAnswer: @", 1, 0),
        ("dollars", "I compute.\nAnswer: $@$", 1, 0),
        ("bold", "I compute.\n\n**Answer:** @", 1, 0),
        ("box in the line", "I compute.\nAnswer: \\boxed{@}", 1, 0),
        ("box only", r"I compute. It is \boxed{@}.", 1, 0),
        ("two lines", "Answer: ~\nNo.\nAnswer: @", 1, 0),
        ("equation", "I compute.\nAnswer: k = @", 1, 0),
        ("lower case", "I compute.\nanswer : @.", 1, 0),
        ("not at the end", "Answer: @" + "\nAnd so on." * 40, 0, 0),
        ("no answer", "I compute. It is @.", 0, 0),
    ],
}


class Case(NamedTuple):
    """A response, and the scores that it should have."""

    kind: str  # of answer
    form: str
    plain: str  # the same answer in the plain form
    response: str
    ground_truth: str
    accuracy: bool  # as it should be
    format: bool


def make_cases(name: str) -> list[Case]:
    cases = []
    plain = FORMS[name][0][1]
    for (kind, truth, right, wrong), (form, text, counts, formatted) in product(ANSWERS, FORMS[name]):
        for answer in right + wrong:
            other = (wrong if answer in right else right)[0]
            response = text.replace("@", answer).replace("~", other)
            tagged = f"<answer>{truth}</answer>" if form == "ground truth with tags" else truth
            accurate = bool(counts) and answer in right
            cases.append(
                Case(kind, form, plain.replace("@", answer), response, tagged, accurate, bool(formatted))
            )
    return random.Random(0).sample(cases, NUM_RESPONSES)


def load(path: Path) -> tuple[Callable[..., Any], bool]:
    """Return a file's `compute_score`, and whether it takes a list."""
    spec = spec_from_file_location(f"{path.parents[2].name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score, path.stem != "r1v"


def score(path: Path, responses: list[tuple[str, str]]) -> list[dict[str, float]]:
    function, takes_list = load(path)
    rows = [
        {"response": response, "ground_truth": truth, "response_length": 10} for response, truth in responses
    ]
    kwargs = DAPO if path.stem == "dapo" else {}
    return function(rows, **kwargs) if takes_list else [function(row, **kwargs) for row in rows]


def count_differences(name: str, folder: Path) -> Counter[tuple[str, str, bool]]:
    """Count differing scores by score, cause and whether ours is right."""
    cases = make_cases(name)
    responses = [(case.response, case.ground_truth) for case in cases]
    plain = [(case.plain, case.ground_truth) for case in cases]
    files = [root / "examples" / "reward_function" / f"{name}.py" for root in (HERE, folder)]
    ours, theirs = (score(file, responses) for file in files)
    plain_ours, plain_theirs = (score(file, plain) for file in files)
    counts: Counter[tuple[str, str, bool]] = Counter()
    for number, case in enumerate(cases):
        for key in ("accuracy", "format"):
            if ours[number].get(key) == theirs[number].get(key):
                continue
            by_answer = key == "accuracy" and plain_ours[number][key] != plain_theirs[number][key]
            cause = f"answer: {case.kind}" if by_answer else f"form: {case.form}"
            counts[key, cause, (ours[number][key] > 0) == getattr(case, key)] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repository", type=Path, help="a checkout of EasyR1 or Long-RL")
    arguments = parser.parse_args()
    totals = {}
    print("| reward | score | cause | differences | ours is right | theirs is right |")
    print("|---|---|---|---|---|---|")
    for name in FORMS:
        counts = count_differences(name, arguments.repository)
        totals[name] = {"differences": counts.total(), "theirs_right": 0}
        for key, cause in sorted({(key, cause) for key, cause, _ in counts}):
            right, wrong = counts[key, cause, True], counts[key, cause, False]
            totals[name]["theirs_right"] += wrong
            print(f"| {name} | {key} | {cause} | {right + wrong} | {right} | {wrong} |")
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
