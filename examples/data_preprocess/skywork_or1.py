# SPDX-License-Identifier: Apache-2.0
"""Convert Skywork-OR1-RL-Data: mathematics and programming, filtered by difficulty.

    python3 examples/data_preprocess/skywork_or1.py skywork_or1_7b --input Skywork/Skywork-OR1-RL-Data@math --output maths.parquet
    python3 examples/data_preprocess/skywork_or1.py skywork_or1_7b --input Skywork/Skywork-OR1-RL-Data@code --output code.parquet

A row's `level` counts the wrong answers among 16 of the model that is to be trained, DeepSeek-R1-Distill-Qwen of
1.5, 7 or 32 billion parameters. As in the report, rows that it answers always or never are left out.
"""  # noqa: E501

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import DataSet, main, single_message, text
from verl.data.bad_rows import BadRowError
from verl.data.files import Row

ATTEMPTS = 16
MODELS = {"1p5b": "1.5B", "7b": "7B", "32b": "32B"}


def convert(model: str, row: Row) -> Row:
    extra = row.get("extra_info") or {}
    level = (extra.get("model_difficulty") or {}).get(model)
    if level is None:
        raise BadRowError(f"it has no difficulty for {model}")
    if not 0 < level < ATTEMPTS:
        raise BadRowError(f"{model} answers it {'always' if level == 0 else 'never'}")
    return {
        "problem": single_message(row["prompt"]),
        "answer": _answer(text(row["reward_model"] or {}, "ground_truth"), row["ability"]),
        "ability": row["ability"],
        "level": level,
        "id": extra.get("index"),
        "data_source": row.get("data_source"),
    }


def _answer(truth: str, ability: str) -> str:
    """Return the tests of a program as JSON, or the text of the only right answer."""
    try:
        value: Any = json.loads(truth)
    except json.JSONDecodeError:
        return truth
    if ability == "code":
        kept = {key: item for key, item in value.items() if item is not None}
        return json.dumps(kept)
    if not isinstance(value, list):
        return truth
    if len(value) != 1:
        raise BadRowError("it has several right answers")
    return str(value[0])


DATA_SETS = [
    DataSet(
        f"skywork_or1_{name}",
        f"Mathematics and programming; difficult for a model of {size}",
        partial(convert, f"DeepSeek-R1-Distill-Qwen-{size}"),
        hub_names=("Skywork/Skywork-OR1-RL-Data",),
        columns=("prompt", "reward_model", "ability", "extra_info"),
        example="skywork_or1/train",
        is_converted_by_example=True,
    )
    for name, size in MODELS.items()
]


if __name__ == "__main__":
    sys.exit(main(DATA_SETS, __doc__))
