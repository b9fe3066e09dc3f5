# SPDX-License-Identifier: Apache-2.0
r"""Convert MATH: competition mathematics; the answer is LaTeX.

    python3 examples/data_preprocess/math_dataset.py --input hiyouga/math12k@train --output train.parquet

The answer is column `answer` or, without it, the last `\boxed{}` of the solution.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import DataSet, main, text
from verl.data.bad_rows import BadRowError
from verl.data.files import Row
from verl.rewards.graders.math import last_boxed

BARE_BOXED = re.compile(r"\\boxed\s+([^\s{}$]+)")  # a few rows of MATH: `\boxed 5`


def convert(row: Row) -> Row:
    answer = row.get("answer") or _boxed(text(row, "solution"))
    if answer is None:
        raise BadRowError(r"the solution has no \boxed{}")
    level = re.search(r"\d+", str(row.get("level")))  # `Level 3`, 3, or `Level ?`
    return {
        "problem": text(row, "problem"),
        "answer": answer,
        "solution": row.get("solution"),
        "level": int(level[0]) if level else None,
        "subject": row.get("subject") or row.get("type"),
        "id": row.get("unique_id"),
    }


def _boxed(solution: str) -> str | None:
    solution = solution.replace(r"\fbox{", r"\boxed{")  # in a few rows of MATH
    bare = BARE_BOXED.findall(solution)
    return last_boxed(solution) or (bare[-1] if bare else None)


DATA_SET = DataSet(
    "math",
    "Competition mathematics; the answer is LaTeX",
    convert,
    hub_names=("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "hiyouga/math12k"),
    columns=("problem", "answer|solution"),
    example="qwen2_5_7b_math_grpo",
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
