# SPDX-License-Identifier: Apache-2.0
"""Convert Geometry3K: geometry with a figure; the answer is LaTeX.

    python3 examples/data_preprocess/geometry3k.py --input hiyouga/geometry3k@train --output train.parquet

The choices of a problem are kept as `choices`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import DataSet, main, text, with_images
from verl.data.files import Row


def convert(row: Row) -> Row:
    identity = row.get("id")
    return with_images(row, row["images"], text(row, "answer")) | {
        "choices": row.get("choices"),
        "id": None if identity is None else str(identity),
    }


DATA_SET = DataSet(
    "geometry3k",
    "Geometry with a figure; the answer is LaTeX",
    convert,
    hub_names=("hiyouga/geometry3k",),
    columns=("images", "problem", "answer"),
    example="qwen2_5_vl_7b_geo3k_grpo",
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
