# SPDX-License-Identifier: Apache-2.0
"""Convert LongVideo-Reason: questions about long videos; the answer is the letter of a choice.

    python3 examples/data_preprocess/longvideo_reason.py --input rows.jsonl --output train.parquet

`response` joins the reasoning and the answer in the format of `examples/format_prompt/r1v.jinja`, so the
rows can also be used for supervised fine-tuning. Rows without reasoning have no response. Videos are paths.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a clone without installing

from examples.data_preprocess.common import VIDEO_MARKER, DataSet, main, text, untagged_answer
from verl.data.bad_rows import BadRowError
from verl.data.files import Row

TAGGED_REASONING = re.compile(r"\s*<think>(.*)</think>\s*", re.DOTALL)


def convert(row: Row) -> Row:
    videos = row["videos"] if isinstance(row["videos"], list) else [row["videos"]]
    if not videos or not all(isinstance(video, str) and video for video in videos):
        raise BadRowError("`videos` must be the path of a video, or a list of paths")
    answer, problem_id = untagged_answer(row), row.get("problem_id")
    return {
        "problem": VIDEO_MARKER * len(videos) + text(row, "problem").replace(VIDEO_MARKER, ""),
        "answer": answer,
        "videos": videos,
        "response": _response(row, answer),
        "subject": row.get("problem_type"),
        "id": None if problem_id is None else str(problem_id),
    }


def _response(row: Row, answer: str) -> str | None:
    if not row.get("reasoning"):
        return None
    reasoning = text(row, "reasoning")
    tagged = TAGGED_REASONING.fullmatch(reasoning)
    reasoning = (tagged[1] if tagged else reasoning).strip()
    if any(tag in reasoning for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        raise BadRowError("the reasoning contains tags of the response format")
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


DATA_SET = DataSet(
    "longvideo_reason",
    "Questions about long videos; the answer is the letter of a choice",
    convert,
    hub_names=("LongVideo-Reason/longvideo-reason",),
    columns=("problem", "answer", "videos"),
    example="qwen2_5_vl_3b_video_grpo",
)


if __name__ == "__main__":
    sys.exit(main([DATA_SET], __doc__))
