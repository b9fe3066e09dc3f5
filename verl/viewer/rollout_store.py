# SPDX-License-Identifier: Apache-2.0
"""Rollouts on disk, beside the run they come from: written while it trains, read by the viewer or a notebook.

    rollouts/step_12.parquet   one row for each kept response of step 12, columns as in `SCHEMA`
    rollouts/media/*.jpg       what the model saw of images and videos, small, named by the content

Files appear whole. A step that a resumed run repeats replaces its file. To read all of a run's scores:

    files = step_files(Path("checkpoints/math/first")).values()
    pyarrow.dataset.dataset([str(file) for file in files]).to_table(["step", "score"])

To keep another value of a response: a column of `SCHEMA`, filled where rows are made.
"""

import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import write_whole

FOLDER, MEDIA = "rollouts", "media"
STEP_FILE = re.compile(r"step_(\d+)\.parquet")
MEDIA_FILE = re.compile(r"[0-9a-f]{40}\.jpg")
LONGEST_SIDE = 448  # pixels of a kept image
JPEG_QUALITY = 80
START_LENGTH = 160  # characters of a text that tables show

_FLOATS = pa.list_(pa.float32())
_MEDIUM = pa.struct(
    [
        pa.field("kind", pa.string()),  # "image" or "video"
        pa.field("source", pa.string()),  # the path or URL in the row, or how many bytes it had
        pa.field("files", pa.list_(pa.string())),  # of the media folder: the image, or frames of the video
        pa.field("problem", pa.string()),  # why there are none
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32()),
        pa.field("group", pa.string()),  # the prompt's `uid`
        pa.field("sample", pa.int32()),  # number of the response in its group
        pa.field("data_source", pa.string()),
        pa.field("score", pa.float32()),  # all terms; null if the reward function failed
        pa.field("advantage", pa.float32()),  # mean over the tokens that are trained on; null without any
        pa.field("prompt_length", pa.int32()),  # tokens
        pa.field("response_length", pa.int32()),  # tokens
        pa.field("finish_reason", pa.string()),
        pa.field("num_media", pa.int32()),
        pa.field("prompt_start", pa.string()),
        pa.field("response_start", pa.string()),
        pa.field("prompt", pa.string()),
        pa.field("messages", pa.string()),  # the prompt before the chat template, as JSON
        pa.field("response", pa.string()),
        pa.field("ground_truth", pa.string()),
        pa.field("reward_values", pa.map_(pa.string(), pa.float32())),  # what the reward function returned
        pa.field("media", pa.list_(_MEDIUM)),
        pa.field("token_ids", pa.list_(pa.int32())),  # of the response, as all lists below
        pa.field("tokens", pa.list_(pa.string())),  # each decoded alone
        pa.field("rollout_log_probs", _FLOATS),
        pa.field("old_log_probs", _FLOATS),
        pa.field("advantages", _FLOATS),
    ]
)
TABLE_COLUMNS = SCHEMA.names[
    : SCHEMA.names.index("prompt")
]  # few bytes each: those of all steps fit in memory

logger = get_logger(__name__)


class RolloutStore:
    """The rollouts of one run, as the process that trains writes them.

    Example::

        store = RolloutStore(Path("checkpoints/math/first"))
        file = store.add_image(image)
        store.write(12, [{"step": 12, "group": "step12-0-0", "response": "4", "media": [...], ...}])
    """

    def __init__(self, run_folder: Path) -> None:
        """Write into `rollouts` of the run's folder; nothing is made before the first row comes."""
        self.folder = run_folder / FOLDER

    def write(self, step: int, rows: Sequence[dict[str, Any]]) -> bool:
        """Write the rows of a step in place of those that are there.

        Args:
            step: Names the file.
            rows: By the names of `SCHEMA`; a name that is missing is null.

        Returns:
            Whether there was room on the disk; without room a warning says so, and the step is left out.

        Raises:
            ValueError: A row has a column that is not in `SCHEMA`.
            OSError: The folder cannot be written for another reason.
        """
        unknown = sorted({name for row in rows for name in row} - set(SCHEMA.names))
        if unknown:
            raise ValueError(f"a rollout has no columns {unknown}: they are {SCHEMA.names}")
        table = pa.Table.from_pylist([_storable(row) for row in rows], schema=SCHEMA)
        content = io.BytesIO()
        pq.write_table(table, content, compression="zstd")
        return self._write(self.folder / f"step_{step}.parquet", content.getvalue())

    def add_image(self, image: Image.Image) -> str | None:
        """Keep a small copy of an image.

        Args:
            image: Of any size and mode; it is not changed.

        Returns:
            The name of its file, equal for equal content; None if the disk has no room.
        """
        small = image.convert("RGB")
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        content = io.BytesIO()
        small.save(content, "JPEG", quality=JPEG_QUALITY)
        name = hashlib.blake2b(content.getvalue(), digest_size=20).hexdigest() + ".jpg"
        path = self.folder / MEDIA / name
        return name if path.exists() or self._write(path, content.getvalue()) else None

    def _write(self, path: Path, content: bytes) -> bool:
        is_written = write_whole(path, content, make_room=lambda size: None)
        if not is_written:
            logger.warning("no room to keep rollouts: file=%s bytes=%d", path, len(content))
        return is_written


def step_files(run_folder: Path) -> dict[int, Path]:
    """The file of each step that is there, by step."""
    found = {}
    for path in (run_folder / FOLDER).glob("step_*.parquet"):
        if match := STEP_FILE.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def _storable(row: dict[str, Any]) -> dict[str, Any]:
    """The row with texts that UTF-8 can hold, and the starts of the long ones."""
    texts = {name: _clean(value) for name, value in row.items() if isinstance(value, str)}
    starts = {f"{name}_start": texts[name][:START_LENGTH] for name in ("prompt", "response") if name in texts}
    return row | texts | starts


def _clean(text: str) -> str:
    return text.encode(errors="replace").decode()
