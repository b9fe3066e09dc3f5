# SPDX-License-Identifier: Apache-2.0
"""Convert GSM8K: grade-school mathematics; the answer is a whole number.

    python3 examples/data_preprocess/gsm8k.py --input openai/gsm8k@train --output train.parquet

Column `answer` has the whole solution, with the result after `####` and calculations in `<<48/2=24>>`.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import DataSet, main, text
from verl.data.bad_rows import BadRowError
from verl.data.files import Row

CALCULATION = re.compile(r"<<[^<>]*>>")


def convert(row: Row) -> Row:
    solution, marker, result = text(row, "answer").rpartition("####")
    if not marker:
        raise BadRowError("the answer has no result behind ####")
    return {
        "problem": text(row, "question"),
        "answer": result.replace(",", "").strip(),
        "solution": CALCULATION.sub("", solution).strip(),
    }


DATA_SET = DataSet(
    "gsm8k",
    "Grade-school mathematics; the result is a whole number",
    convert,
    hub_names=("openai/gsm8k",),
    columns=("question", "answer"),
    example="qwen2_5_7b_math_grpo",
    subset="main",
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
