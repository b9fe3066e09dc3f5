# SPDX-License-Identifier: Apache-2.0
"""Rollouts on disk, next to the checkpoints: written during training, read by the viewer or a notebook.

    rollouts/step_12.parquet         one row per kept response of step 12, columns as in `SCHEMA`
    rollouts/validation_12.parquet   the same of the validation after step 12; 0 is before training
    rollouts/media/*.jpg             small copies of the model's images and frames, named by their content
    rollouts/media/*.image           images that were given as bytes, with `trainer.keep_whole_images`
    rollouts/media/*.png, *.mp4      pictures and videos that the policy made, named by their pixels

Files appear complete. A step that a resumed run repeats replaces its files. To read all scores of a run:

    files = step_files(Path("checkpoints/math/first")).values()
    pyarrow.dataset.dataset([str(file) for file in files]).to_table(["step", "score"])

To keep another value of a response, add a column to `SCHEMA` and fill it where rows are created.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import write_whole
from verl.viewer.pictures import as_mp4, as_png, to_rows

FOLDER, MEDIA = "rollouts", "media"
TRAIN, VALIDATION = "train", "validation"
FILE_PREFIXES = {TRAIN: "step", VALIDATION: "validation"}  # by kind of rollout
STEP_FILE = re.compile(r"[a-z]+_(\d{1,9})\.parquet", re.ASCII)
SERVED = {".jpg": "image/jpeg", ".png": "image/png", ".mp4": "video/mp4"}  # types of kept files
MEDIA_FILE = re.compile(rf"[0-9a-f]{{40}}({'|'.join(map(re.escape, SERVED))})")
WHOLE = ".image"  # ending of an image of any format
LONGEST_SIDE = 448  # of a kept image, pixels
JPEG_QUALITY = 80
START_LENGTH = 160  # characters of a text in tables

_TEXT, _FLOAT, _INT, _BOOL = pa.string(), pa.float32(), pa.int32(), pa.bool_()
_FLOATS = pa.list_(_FLOAT)


def _struct(**fields: pa.DataType) -> pa.StructType:
    return pa.struct(fields)


_MEDIUM = _struct(
    kind=_TEXT,  # "image", "video" or "audio"
    source=_TEXT,  # path or URL in the row, or its number of bytes
    # in the media folder: the image, frames of the video, or a drawing of the audio
    files=pa.list_(_TEXT),
    problem=_TEXT,  # reason if there are none
    times=pa.list_(_FLOAT),  # of the frames of a video, in seconds
    # file in the media folder: the bytes of an image, if they were kept, or the video the policy made
    whole=_TEXT,
)
_OBSERVATION = _struct(
    text=_TEXT,
    failed=_BOOL,  # the tool raised, hung or died, or there is none of that name
    seconds=_FLOAT,  # of the tool; null if none was called
    num_media=_INT,
    media=pa.list_(_MEDIUM),  # none if the conversation ended before them
)
_CALL = _struct(name=_TEXT, arguments=_TEXT)  # arguments as JSON
_TURN = _struct(
    start=_INT,  # in the lists of tokens
    stop=_INT,
    text=_TEXT,  # of the policy
    calls=pa.list_(_CALL),
    observations=pa.list_(_OBSERVATION),  # to the calls in order; fewer if not all were made
    is_shown=_BOOL,  # the policy could read them
    seconds=_FLOAT,  # from the turn to the last observation
    reward=_FLOAT,  # the sum of the observations'; null without any
)
_CONTEXT = _struct(
    start=_INT,  # in the lists of tokens
    num_turns=_INT,  # those of the contexts follow each other
    num_opening=_INT,  # messages before its first turn
    messages=_TEXT,  # all, as JSON; the policy's as it wrote them
    tools=_TEXT,  # schemas as JSON
    media=pa.list_(_MEDIUM),  # of its first messages; those of the first one are the row's
)
SCHEMA = pa.schema(
    _struct(
        step=_INT,
        group=_TEXT,  # the prompt's `uid`
        sample=_INT,  # index of the response in its group
        data_source=_TEXT,
        score=_FLOAT,  # with all terms; null if the reward function failed
        advantage=_FLOAT,  # mean over the trained tokens; null without any
        prompt_length=_INT,  # tokens
        response_length=_INT,  # tokens
        finish_reason=_TEXT,
        num_media=_INT,
        num_turns=_INT,  # of a conversation, like all columns up to `stop_reason`
        num_calls=_INT,
        num_failures=_INT,  # of calls
        stop_reason=_TEXT,  # "stop", "done", "tool", or the limit that cut it off
        is_masked=_BOOL,  # no token is trained
        prompt_start=_TEXT,
        response_start=_TEXT,
        picture_start=_TEXT,  # file in the media folder: the picture, or its first frame
        prompt=_TEXT,
        messages=_TEXT,  # the prompt before the chat template, as JSON
        response=_TEXT,
        ground_truth=_TEXT,
        reward_values=pa.map_(_TEXT, _FLOAT),  # values of the reward function
        media=pa.list_(_MEDIUM),
        picture=_MEDIUM,  # that the policy made; null for a text
        contexts=pa.list_(_CONTEXT),  # several if an agent shortened what the policy reads
        turns=pa.list_(_TURN),
        token_ids=pa.list_(_INT),  # of the response, like all lists below
        tokens=pa.list_(_TEXT),  # each decoded separately
        is_trained=pa.list_(_BOOL),  # false on what tools answered and on masked responses
        rollout_log_probs=_FLOATS,
        old_log_probs=_FLOATS,  # null in validation
        advantages=_FLOATS,  # null in validation
    )
)
# Short columns: those of all steps fit in memory.
TOKEN_COLUMNS = SCHEMA.names[SCHEMA.names.index("token_ids") :]
TABLE_COLUMNS = SCHEMA.names[: SCHEMA.names.index("prompt")]

logger = get_logger(__name__)


class RolloutStore:
    """Writer of one run's rollouts, in the training process.

    Example::

        store = RolloutStore(Path("checkpoints/math/first"))
        file = store.add_image(image)
        store.write(12, [{"step": 12, "group": "step12-0-0", "response": "4", "media": [...], ...}])
    """

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        self._lost = 0  # files of this step for which there was no room

    def write(self, step: int, rows: Sequence[dict[str, Any]], kind: str = TRAIN) -> bool:
        """Write the rows of a step over earlier ones; missing columns are null. False if the disk is full."""
        unknown = sorted({name for row in rows for name in row} - set(SCHEMA.names))
        if unknown:
            raise ValueError(f"a rollout has no columns {unknown}; its columns are {SCHEMA.names}")
        table = pa.Table.from_pylist([_storable(row) for row in rows], schema=SCHEMA)
        content = io.BytesIO()
        pq.write_table(table, content, compression="zstd")
        is_written = self._write(self.folder / f"{FILE_PREFIXES[kind]}_{step}.parquet", content.getvalue())
        if self._lost:
            text = "no room to keep rollouts: path=%s step=%d files=%d"
            logger.warning(text, self.folder, step, self._lost)
        self._lost = 0
        return is_written

    def add_image(self, image: Image.Image) -> str | None:
        """Keep a small copy of an image; return its file name, or None if the disk is full."""
        small = image.convert("RGB")
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        content = io.BytesIO()
        small.save(content, "JPEG", quality=JPEG_QUALITY)
        return self._add(content.getvalue(), ".jpg", content.getvalue)

    def add_whole(self, content: bytes) -> str | None:
        """Keep an image as it is; return its file name, or None if the disk is full."""
        return self._add(content, WHOLE, lambda: content)

    def add_picture(self, pixels: np.ndarray) -> str | None:
        """Keep a picture (3, H, W) uint8 as PNG; return its file name, or None if the disk is full."""
        return self._add(_identity(pixels), ".png", lambda: as_png(pixels))

    def add_video(self, frames: np.ndarray) -> str | None:
        """Keep a video (F, 3, H, W) uint8 as MP4; return its file name, or None if the disk is full."""
        return self._add(_identity(frames), ".mp4", lambda: as_mp4(frames))

    def add_thumbnail(self, pixels: np.ndarray) -> str | None:
        """Keep a picture (3, H, W) for tables: as it is if it is small, or a small copy."""
        if max(pixels.shape) <= LONGEST_SIDE:
            return self.add_picture(pixels)
        return self.add_image(Image.fromarray(to_rows(pixels)))

    def path(self, name: str) -> Path:
        return self.folder / MEDIA / name

    def _add(self, named_by: bytes, ending: str, content: Callable[[], bytes]) -> str | None:
        # The same picture is neither encoded nor written again.
        name = hashlib.blake2b(named_by, digest_size=20).hexdigest() + ending
        path = self.path(name)
        return name if path.exists() or self._write(path, content()) else None

    def _write(self, path: Path, content: bytes) -> bool:
        is_written = write_whole(path, content, make_room=lambda size: None)
        self._lost += not is_written
        return is_written


def step_files(run_folder: Path, kind: str = TRAIN) -> dict[int, Path]:
    """Return the existing files of a kind, by step; links out of the run's folder are left out."""
    paths = (run_folder / FOLDER).glob(f"{FILE_PREFIXES[kind]}_*.parquet")
    found = [(STEP_FILE.fullmatch(path.name), path) for path in paths]
    return dict(
        sorted((int(match[1]), path) for match, path in found if match and is_inside(path, run_folder))
    )


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path lies in a folder after all links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _identity(pixels: np.ndarray) -> bytes:
    return f"{pixels.shape}".encode() + np.ascontiguousarray(pixels).tobytes()


def _storable(row: dict[str, Any]) -> dict[str, Any]:
    # Replaces what UTF-8 cannot encode and adds the starts of long texts.
    row = {name: value if name in TOKEN_COLUMNS else _encodable(value) for name, value in row.items()}
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    starts = {f"{name}_start": texts[name][:START_LENGTH] for name in ("prompt", "response") if name in texts}
    return row | starts


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {name: _encodable(one) for name, one in value.items()}
    return value
