# SPDX-License-Identifier: Apache-2.0
r"""Count wrong verdicts on 300 pairs of answers: ours, mathruler's and math-verify's.

`math_answers.jsonl` was written by hand, before the grader that it measures: each line has an answer, a
ground truth, whether they are the same, and whether every reader would agree on that (`clear`). mathruler
and math-verify take part if they are installed; math-verify parses both in `$...$`, which gives it fewer
errors here than `\boxed{...}` or plain text.

    pip install mathruler pylatexenc math-verify
    python benchmarks/math_answers.py --show
"""

import argparse
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.rewards.graders.math import same_answer

PAIRS = Path(__file__).with_suffix(".jsonl")
Grader = Callable[[str, str], bool]


def read_pairs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


def graders() -> Iterator[tuple[str, Grader]]:
    yield "ours", same_answer
    if find_spec("mathruler"):
        from mathruler.grader import grade_answer  # noqa: PLC0415 (optional)

        yield "mathruler", lambda answer, truth: bool(grade_answer(answer, truth))
    if find_spec("math_verify"):
        from math_verify import parse, verify  # noqa: PLC0415 (optional)

        yield "math-verify", lambda answer, truth: bool(verify(parse(f"${truth}$"), parse(f"${answer}$")))


def wrong_verdicts(grader: Grader, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [pair for pair in pairs if grader(pair["answer"], pair["ground_truth"]) != pair["same"]]


def count(wrong: list[dict[str, Any]]) -> dict[str, int]:
    clear = [pair for pair in wrong if pair["clear"]]
    return {
        "false_positives": sum(not pair["same"] for pair in wrong),
        "false_negatives": sum(pair["same"] for pair in wrong),
        "clear_false_positives": sum(not pair["same"] for pair in clear),
        "clear_false_negatives": sum(pair["same"] for pair in clear),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print every pair that a grader gets wrong")
    arguments = parser.parse_args()
    pairs = read_pairs()
    counts = {}
    for name, grader in graders():
        wrong = wrong_verdicts(grader, pairs)
        counts[name] = count(wrong)
        for pair in wrong if arguments.show else []:
            print(f"{name}: {pair['answer']!r} for {pair['ground_truth']!r} is not {not pair['same']}")
    same = sum(pair["same"] for pair in pairs)
    print(json.dumps({"same": same, "different": len(pairs) - same, "clear": sum(p["clear"] for p in pairs)}))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
