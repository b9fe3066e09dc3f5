# SPDX-License-Identifier: Apache-2.0
"""Convert LiveCodeBench: programming contests by month, with their tests.

    python3 examples/data_preprocess/livecodebench.py --input test6.jsonl --output livecodebench.parquet

The files `test.jsonl` to `test6.jsonl` are those of `livecodebench/code_generation_lite` on the hub.
`sub_category` is the month of a contest, for `verl-eval --by sub_category`.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import DataSet, main, text
from verl.data.files import Row

TESTS = ("public_test_cases", "private_test_cases", "metadata")
STDIN = "Read the input from stdin and write the output to stdout."
STARTER = "Complete this code:\n\n```python\n{}\n```"


def convert(row: Row) -> Row:
    starter = row.get("starter_code") or ""
    asked = STARTER.format(starter.rstrip()) if starter.strip() else STDIN
    problem = text(row, "question_content").strip()
    return {
        "problem": f"{problem}\n\n{asked} Write the whole program in a ```python block.",
        "answer": json.dumps({key: row[key] for key in TESTS}),
        "ability": "code",
        "sub_category": str(row["contest_date"])[:7],
        "id": row.get("question_id"),
    }


DATA_SET = DataSet(
    "livecodebench",
    "Programming contests by month",
    convert,
    hub_names=("livecodebench/code_generation_lite",),
    columns=("question_content", "contest_date", *TESTS),
    example="skywork_or1/eval",
    is_benchmark=True,
    is_converted_by_example=True,
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
