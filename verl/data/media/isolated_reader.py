# SPDX-License-Identifier: Apache-2.0
"""Read the media of rows in a child process, because a decoder may crash or hang."""

import os
from collections.abc import Mapping
from functools import partial

import torch

from verl.data.media.loader import MediaLoader
from verl.data.media.references import MediaData, shown_name
from verl.models.families.interface import MediaShape
from verl.utils.processes.isolated_calls import IsolatedCalls

ROW_TIMEOUT_S = 300.0


class MediaReader:
    """Reads the media of rows in a child process, one row at a time.

    Decoded media go to the loader's cache; only sizes come back. A row that ends the process is tried once
    more. Media named by URL are fetched in this process before, within limits of their own.

    Args:
        timeout_s: Limit for a row in seconds, not counting downloads; None means no limit.
        columns: Column names of `images` and `videos`, for errors.
    """

    def __init__(self, loader: MediaLoader, timeout_s: float | None, columns: Mapping[str, str]) -> None:
        self.loader, self._columns = loader, columns
        self._calls = IsolatedCalls(partial(_read, loader), timeout_s, partial(_enter, loader), retry=True)

    def read(self, media: MediaData, *, decode: bool) -> MediaShape:
        """Return the shapes of a row's media, decoded into the loader's cache or only measured.

        A file that cannot be fetched or read, or that ends or holds up the process, is a ValueError.
        """
        names: list[str] = []
        for kind in self._columns:
            refs = (media or {}).get(kind) or ()
            names += [f"the {kind.removesuffix('s')} {shown_name(ref)}" for ref in refs]
            try:
                for ref in refs:
                    self.loader.on_disk(ref)
            except ValueError as error:
                raise ValueError(f"column `{self._columns[kind]}`: {error}") from error
        try:
            return self._calls((media, decode))
        except (ChildProcessError, TimeoutError) as error:
            raise ValueError(f"the process that read {', '.join(names)} {error}") from error

    def close(self) -> None:
        self._calls.close()


def _read(loader: MediaLoader, request: tuple[MediaData, bool]) -> MediaShape:
    media, decode = request
    return loader.shape_of(loader.decode(media)) if decode else loader.measure(media)


def _enter(loader: MediaLoader) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # a forked process has lost the threads of its parent
    if loader.cache.directory is not None:
        loader.cache.local_bytes = 0  # nothing is asked for twice, and others find it in the directory
