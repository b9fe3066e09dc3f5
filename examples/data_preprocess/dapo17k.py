# SPDX-License-Identifier: Apache-2.0
"""Convert DAPO-Math-17k: competition mathematics; the answer is a whole number.

    python3 examples/data_preprocess/dapo17k.py --input dapo-math-17k.parquet --output train.parquet

Each of about 17 thousand problems occurs in a hundred rows. The prompts include instructions for the answer's
format; they are removed because the prompt template has its own.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import DataSet, main, single_message, text
from verl.data.bad_rows import BadRowError
from verl.data.files import Row

HEAD = re.compile(r"\s*Solve the following math problem step by step\.[^\n]*\$Answer[^\n]*\n+")
TAIL = re.compile(r'\s*Remember to put your answer on its own line after "Answer:"\.?\s*\Z')


def convert(row: Row) -> Row:
    return {
        "problem": _without_instructions(single_message(row["prompt"])),
        "answer": text(row["reward_model"] or {}, "ground_truth"),
        "ability": row.get("ability"),
        "id": (row.get("extra_info") or {}).get("index"),
        "data_source": row.get("data_source"),
    }


def _without_instructions(prompt: str) -> str:
    head, tail = HEAD.match(prompt), TAIL.search(prompt)
    if (head is None) != (tail is None):
        raise BadRowError("the prompt has half of the instructions around a problem")
    return prompt if head is None or tail is None else prompt[head.end() : tail.start()].strip()


DATA_SET = DataSet(
    "dapo17k",
    "Competition mathematics; the answer is a whole number",
    convert,
    hub_names=("BytedTsinghua-SIA/DAPO-Math-17k",),
    columns=("prompt", "reward_model"),
    example="qwen3_14b_dapo17k_dapo",
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
