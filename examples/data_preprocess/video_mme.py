# SPDX-License-Identifier: Apache-2.0
"""Convert Video-MME: questions about videos of all lengths; the answer is the letter of a choice.

    python3 examples/data_preprocess/video_mme.py --input lmms-lab/Video-MME@test --output video_mme.parquet

`duration`, `domain`, `sub_category` and `task_type` are columns, for `data.category_keys`. Videos are the
paths `data/VIDEO_ID.mp4` of the archive that the data set comes with.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import VIDEO_MARKER, DataSet, either, main, text
from verl.data.bad_rows import BadRowError
from verl.data.files import Row

CATEGORIES = ("duration", "domain", "sub_category", "task_type")
OPTION = re.compile(r"\s*([A-H])\s*[.):]\s*(.*\S)\s*", re.DOTALL)


def convert(row: Row) -> Row:
    options = row.get("options")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise BadRowError("`options` must be a list of texts")
    choices = [_choice(letter, option) for letter, option in zip("ABCDEFGH", options, strict=False)]
    answer = text(row, "answer").strip().strip("().")
    if answer not in list("ABCDEFGH"[: len(choices)]):
        raise BadRowError(f"the answer ({answer!r}) must be the letter of one of {len(choices)} options")
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", choices, strict=False))
    video = text({"videoID": either(row, "videoID", "video_id")}, "videoID")
    return {
        "problem": f"{VIDEO_MARKER}{text(row, 'question').strip()}\n{listed}",
        "answer": answer,
        "videos": [f"data/{video}.mp4"],
        "choices": choices,
        **{column: row.get(column) for column in CATEGORIES},
        "id": row.get("question_id"),
    }


def _choice(letter: str, option: str) -> str:
    """Return the text of an option, whose letter must be the one that its place says."""
    lettered = OPTION.fullmatch(option)
    if lettered is None:
        return option.strip()
    if lettered[1] != letter:
        raise BadRowError(f"option {letter} is lettered {lettered[1]}")
    return lettered[2]


DATA_SET = DataSet(
    "video_mme",
    "Questions about videos of all lengths, with categories; the answer is the letter of a choice",
    convert,
    hub_names=("lmms-lab/Video-MME",),
    columns=("question", "options", "answer", "videoID|video_id"),
    example="qwen2_5_vl_7b_video_mme",
    is_benchmark=True,
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
