# SPDX-License-Identifier: Apache-2.0
"""Convert CLEVR: count the objects in a rendered scene.

    python3 examples/data_preprocess/clevr.py --input BUAADreamer/clevr_count_70k@train --output train.parquet

The answer is column `answer` or `solution`, without `<answer>` tags.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import DataSet, either, main, untagged_answer, with_images
from verl.data.files import Row


def convert(row: Row) -> Row:
    return with_images(row, either(row, "images", "image"), untagged_answer(row))


DATA_SET = DataSet(
    "clevr",
    "Counting the objects in a rendered scene",
    convert,
    hub_names=("BUAADreamer/clevr_count_70k", "leonardPKU/clevr_cogen_a_train"),
    columns=("images|image", "problem", "answer|solution"),
    example="qwen2_5_vl_3b_clevr",
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
