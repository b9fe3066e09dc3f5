# SPDX-License-Identifier: Apache-2.0
"""Convert a public data set to a parquet file for training.

    python3 scripts/convert_data.py gsm8k --input openai/gsm8k@train --output data/gsm8k/train.parquet

`--input` accepts the same values as `data.train_files`: a file, a folder or a data set on the hub, each with
`@split`. With `--val-rows 200`, 200 random rows, drawn with `--seed`, are written to `val.parquet` in the
folder of the output. Unusable rows and repeated problems are left out and counted. `--list` shows the data
sets; each has a file in `examples/data_preprocess/`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from examples.data_preprocess import (
    clevr,
    common,
    dapo17k,
    geometry3k,
    geoqa8k,
    gsm8k,
    livecodebench,
    longvideo_reason,
    math_dataset,
    skywork_or1,
    video_mme,
)

MODULES = (
    clevr, dapo17k, geometry3k, geoqa8k, gsm8k, livecodebench, longvideo_reason, math_dataset, video_mme,
)  # fmt: skip
DATA_SETS = {one.name: one for one in (*(module.DATA_SET for module in MODULES), *skywork_or1.DATA_SETS)}


def main(arguments: Sequence[str] | None = None) -> int:
    return common.main(list(DATA_SETS.values()), __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
