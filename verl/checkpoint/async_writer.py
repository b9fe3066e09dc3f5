# SPDX-License-Identifier: Apache-2.0
"""Background writing of checkpoints, one at a time, so that memory holds at most one copy."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from verl.checkpoint.sharded import NotWrittenError, Snapshot, write_snapshot

PATIENCE = timedelta(hours=12)  # that ranks wait for the slowest disk


class AsyncWriter:
    """A thread on each rank that writes snapshots while training continues."""

    def __init__(self) -> None:
        # The thread's collectives must not mix with those of the training.
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(group, dist.ProcessGroup), "every rank belongs to it"
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(self, folder: Path, snapshots: Mapping[str, Snapshot]) -> None:
        """Start writing each snapshot into the subfolder of its name."""
        assert self._writing is None, "two checkpoints at once would hold two copies"
        self._writing = self._thread.submit(self._write, folder, snapshots)

    def is_done(self) -> bool:
        return self._writing is None or self._writing.done()

    def finish(self) -> str | None:
        """Wait until all ranks have written; return the error message, if any."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            writing.result()
        except NotWrittenError as error:
            return str(error)
        return None

    def _write(self, folder: Path, snapshots: Mapping[str, Snapshot]) -> None:
        for role, snapshot in snapshots.items():
            write_snapshot(folder / role, snapshot, self._group)
