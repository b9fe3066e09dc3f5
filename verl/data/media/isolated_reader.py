# SPDX-License-Identifier: Apache-2.0
"""Media of rows read where a decoder may crash or hang: beside the process that needs to know their size."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from verl.data.media.loader import MediaData, MediaLoader, MediaShape
from verl.data.media.references import Reference, shown_name
from verl.utils.child_process import IsolatedCalls

ROW_TIMEOUT_S = 300.0


class Request(NamedTuple):
    """A row's media, and whether their pixels are wanted or their sizes only."""

    media: MediaData
    decodes: bool


class PlainShape(NamedTuple):
    """A `MediaShape` of arrays: a tensor that is sent to another process holds a file descriptor there."""

    image_grid_thw: np.ndarray
    video_grid_thw: np.ndarray
    second_per_grid_ts: np.ndarray
    timestamps: list[list[float]]


class MediaReader:
    """Opens the media of rows, one row at a time, in a process of its own.

    The process is forked for the first row and anew after one that ended it, which is tried once more. What
    is decoded goes to the loader's cache; only sizes come back. Media named by URL are fetched before, here:
    that has limits of its own.

    Args:
        loader: Reads the media.
        timeout_s: Seconds that reading a row may take, fetching not counted; None is without limit.
        columns: Where the `images` and the `videos` of a row stand, for errors.
    """

    def __init__(self, loader: MediaLoader, timeout_s: float | None, columns: Mapping[str, str]) -> None:
        self._loader, self._columns = loader, columns
        self._calls = IsolatedCalls(partial(_read, loader), timeout_s, enter=partial(_enter, loader))

    def measure(self, media: MediaData) -> MediaShape:
        """Shapes of a row's media from file headers and containers; decodes nothing.

        Raises:
            ValueError: A file cannot be fetched, is missing or is no image or video, or ends or holds up the
                process that opens it; the message names it.
        """
        return self._call(Request(media, decodes=False))

    def decode(self, media: MediaData) -> MediaShape:
        """Decode a row's media into the loader's cache; returns their shapes.

        Raises:
            ValueError: A file cannot be fetched, is missing or corrupt, or ends or holds up the process that
                decodes it; the message names it.
        """
        return self._call(Request(media, decodes=True))

    def close(self) -> None:
        """End the process; the next row starts another."""
        self._calls.close()

    def _call(self, request: Request) -> MediaShape:
        for kind, refs in (request.media or {}).items():
            self._fetch(kind, refs)
        try:
            shape = self._call_twice(request)
        except (ChildProcessError, TimeoutError) as error:
            raise ValueError(f"the process that read {_names(request.media)} {error}") from error
        return MediaShape(
            image_grid_thw=torch.from_numpy(shape.image_grid_thw),
            video_grid_thw=torch.from_numpy(shape.video_grid_thw),
            second_per_grid_ts=torch.from_numpy(shape.second_per_grid_ts),
            timestamps=shape.timestamps,
        )

    def _fetch(self, kind: str, refs: Sequence[Reference]) -> None:
        try:
            for ref in refs:
                self._loader.on_disk(ref)
        except ValueError as error:
            raise ValueError(f"column `{self._columns[kind]}`: {error}") from error

    def _call_twice(self, request: Request) -> PlainShape:
        try:
            return self._calls(request)
        except (
            ChildProcessError
        ):  # it may have died of the memory that others use; a guilty file does it again
            return self._calls(request)


def _read(loader: MediaLoader, request: Request) -> PlainShape:
    if request.decodes:
        shape = loader.shape_of(loader.decode(request.media))
    else:
        shape = loader.measure(request.media)
    return PlainShape(
        shape.image_grid_thw.numpy(),
        shape.video_grid_thw.numpy(),
        shape.second_per_grid_ts.numpy(),
        shape.timestamps,
    )


def _enter(loader: MediaLoader) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # a forked process has lost the threads of the one before
    if loader.cache.directory is not None:
        loader.cache.local_bytes = 0  # it is asked for nothing twice, and others find it in the directory


def _names(media: MediaData) -> str:
    """The files of a row, as an error shows them."""
    return ", ".join(
        f"the {kind.removesuffix('s')} {shown_name(ref)}"
        for kind, refs in (media or {}).items()
        for ref in refs
    )
