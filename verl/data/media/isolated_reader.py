# SPDX-License-Identifier: Apache-2.0
"""Read the media of rows in a child process, because a decoder may crash or hang."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.data.media.loader import MediaData, MediaLoader, MediaShape
from verl.data.media.references import Reference, shown_name
from verl.utils.child_process import IsolatedCalls

ROW_TIMEOUT_S = 300.0


class Request(NamedTuple):
    """Media of a row, to decode or only to measure."""

    media: MediaData
    decodes: bool


class MediaReader:
    """Reads the media of rows in a child process, one row at a time.

    Decoded media go to the loader's cache; only sizes come back. A row that ends the process is tried once
    more. Media named by URL are fetched in this process before, within limits of their own.

    Args:
        loader: Reads the media.
        timeout_s: Limit for a row in seconds, not counting downloads; None is no limit.
        columns: Column names of `images` and `videos`, for errors.
    """

    def __init__(self, loader: MediaLoader, timeout_s: float | None, columns: Mapping[str, str]) -> None:
        self._loader, self._columns = loader, columns
        self._calls = IsolatedCalls(partial(_read, loader), timeout_s, enter=partial(_enter, loader))

    def measure(self, media: MediaData) -> MediaShape:
        """Measure a row's media from file headers and containers, without decoding.

        Raises:
            ValueError: A file cannot be fetched or read, or ends or holds up the process.
        """
        return self._call(Request(media, decodes=False))

    def decode(self, media: MediaData) -> MediaShape:
        """Decode a row's media into the loader's cache and return their shapes.

        Raises:
            ValueError: As `measure`.
        """
        return self._call(Request(media, decodes=True))

    def close(self) -> None:
        """End the process; the next row starts another."""
        self._calls.close()

    def _call(self, request: Request) -> MediaShape:
        for kind, refs in (request.media or {}).items():
            self._fetch(kind, refs)
        try:
            values = self._call_twice(request)
        except (ChildProcessError, TimeoutError) as error:
            raise ValueError(f"the process that read {_names(request.media)} {error}") from error
        timestamps = values.pop("timestamps")
        return MediaShape(
            **{name: torch.from_numpy(value) for name, value in values.items()}, timestamps=timestamps
        )

    def _fetch(self, kind: str, refs: Sequence[Reference]) -> None:
        try:
            for ref in refs:
                self._loader.on_disk(ref)
        except ValueError as error:
            raise ValueError(f"column `{self._columns[kind]}`: {error}") from error

    def _call_twice(self, request: Request) -> dict[str, Any]:
        try:
            return self._calls(request)
        except ChildProcessError:  # perhaps other processes used up the memory; a bad file fails again
            return self._calls(request)


def _read(loader: MediaLoader, request: Request) -> dict[str, Any]:
    if request.decodes:
        shape = loader.shape_of(loader.decode(request.media))
    else:
        shape = loader.measure(request.media)
    # Arrays, because a tensor that is sent to another process holds a file descriptor there.
    return {
        name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(shape).items()
    }


def _enter(loader: MediaLoader) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # a forked process has lost the threads of its parent
    if loader.cache.directory is not None:
        loader.cache.local_bytes = 0  # nothing is asked for twice, and others find it in the directory


def _names(media: MediaData) -> str:
    return ", ".join(
        f"the {kind.removesuffix('s')} {shown_name(ref)}"
        for kind, refs in (media or {}).items()
        for ref in refs
    )
