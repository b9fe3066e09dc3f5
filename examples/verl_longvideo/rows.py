# SPDX-License-Identifier: Apache-2.0
"""Step 6, reformat: rows for reinforcement learning and conversations for fine-tuning, divided by video.

No video is in two of the files. Which one it is in follows from a digest of its name and the seed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from verl_longvideo.prompts import QUESTION, Prompts
from verl_longvideo.questions import Item
from verl_longvideo.state import digest_of

TRAIN, VAL, SFT, SFT_VAL = "train.parquet", "val.parquet", "sft_train.parquet", "sft_val.parquet"
TEXT, TEXTS = pa.string(), pa.list_(pa.string())
COMMON = [("subject", TEXT), ("id", TEXT), ("data_source", TEXT)]
PROMPT_SCHEMA = pa.schema(
    [("problem", TEXT), ("answer", TEXT), ("videos", TEXTS), ("choices", TEXTS), ("response", TEXT), *COMMON]
)
MESSAGE = pa.struct([("role", TEXT), ("content", TEXT)])
SFT_SCHEMA = pa.schema([("messages", pa.list_(MESSAGE)), ("videos", TEXTS), *COMMON])
DATA_SOURCE = "longvideo_reason"


class Split(NamedTuple):
    """The videos of each purpose."""

    val: frozenset[str]
    sft: frozenset[str]  # of the others, those for fine-tuning; the rest is for reinforcement learning


def split_videos(videos: Sequence[str], val_videos: int, sft_share: float, seed: int) -> Split:
    """Divide videos by the digests of their names: the first are for validation, the next for fine-tuning."""
    drawn = sorted(videos, key=lambda video: digest_of(seed, video))
    val, others = drawn[:val_videos], drawn[val_videos:]
    return Split(frozenset(val), frozenset(others[: round(sft_share * len(others))]))


def write_rows(
    folder: Path, items: Sequence[tuple[Item, str]], split: Split, prompts: Prompts
) -> dict[str, int]:
    """Write the files of items with their reasoning; return the numbers of rows by file."""
    val = [each for each in items if each[0].asking.video in split.val]
    sft = [each for each in items if each[0].asking.video in split.sft]
    rest = [each for each in items if each[0].asking.video not in split.val | split.sft]
    files = {
        TRAIN: ([_prompt_row(*each) for each in rest], PROMPT_SCHEMA),
        VAL: ([_prompt_row(*each) for each in val], PROMPT_SCHEMA),
        SFT: ([_conversation(*each, prompts) for each in sft], SFT_SCHEMA),
        SFT_VAL: ([_conversation(*each, prompts) for each in val], SFT_SCHEMA),
    }
    for name, (rows, schema) in files.items():
        partial = folder / f"{name}.tmp"
        pq.write_table(pa.Table.from_pylist(rows, schema), partial)
        partial.replace(folder / name)
    return {name: len(rows) for name, (rows, _) in files.items()}


def _prompt_row(item: Item, reasoning: str) -> dict[str, Any]:
    return _common(item) | {
        "problem": f"<video>{item.problem}",
        "answer": item.answer,
        "choices": list(item.options.values()),
        "response": _response(item, reasoning),
    }


def _conversation(item: Item, reasoning: str, prompts: Prompts) -> dict[str, Any]:
    asked = prompts.render(QUESTION, {"content": f"<video>{item.problem}"})
    texts = {"user": asked, "assistant": _response(item, reasoning)}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    return _common(item) | {"messages": messages}


def _response(item: Item, reasoning: str) -> str:
    return f"<think>{reasoning}</think><answer>{item.answer}</answer>"


def _common(item: Item) -> dict[str, Any]:
    return {
        "videos": [item.asking.video],
        "subject": item.asking.category,
        "id": f"{item.asking.video}/{item.asking.category}-{item.asking.number}",
        "data_source": DATA_SOURCE,
    }
