# SPDX-License-Identifier: Apache-2.0
"""Convert GeoQA-8K: geometry with a figure; the answer is an angle or a length.

    python3 examples/data_preprocess/geoqa8k.py --input leonardPKU/GEOQA_8K_R1V@train --output train.parquet

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
    "geoqa8k",
    "Geometry with a figure; the answer is an angle or a length",
    convert,
    hub_names=("leonardPKU/GEOQA_8K_R1V", "leonardPKU/GEOQA_R1V_Train_8K"),
    columns=("images|image", "problem", "answer|solution"),
    example="qwen2_5_vl_3b_geoqa8k",
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
