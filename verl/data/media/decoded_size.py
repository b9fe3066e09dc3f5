# SPDX-License-Identifier: Apache-2.0
"""Limit of what a Parquet or Arrow file becomes when decoded: two kilobytes can become a terabyte."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.processes.child_process import ChildEndedError, IsolatedCalls, limit_memory

FREE_BYTES, MAX_RATIO = 1 << 30, 100  # a file may become 1 GiB and 100 times its size
MEMORY = 4 << 30  # bytes that decoding a batch may take; a value has at most 2 GiB
BATCH_BYTES, BATCH_ROWS = 32 << 20, 128
VALUE_BYTES = 4  # at least, of a decoded value


def check_decoded_size(path: Path) -> None:
    """Raise a ValueError if the file is damaged or becomes too large."""
    limit = FREE_BYTES + MAX_RATIO * path.stat().st_size
    # In a process with limited memory, as the sizes in the file may be wrong.
    calls = IsolatedCalls(partial(_is_within, limit), None, partial(limit_memory, MEMORY))
    try:
        is_within = calls(path)
    except ChildEndedError:
        is_within = False
    finally:
        calls.close()
    if not is_within:
        raise ValueError(
            f"it becomes more than {limit >> 20} MiB when decoded, the limit for a file of its size (1 GiB"
            f" and {MAX_RATIO} times the file): if you need its rows, write them to several files"
        )


def _is_within(limit: int, path: Path) -> bool:
    total = 0
    try:
        for size in _sizes(path):
            total += size
            if total > limit:
                return False
    except (pa.ArrowMemoryError, MemoryError):
        return False
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error
    return True


def _sizes(path: Path) -> Iterator[int]:
    """Decode batches of rows and yield their sizes in bytes."""
    if path.suffix == ".arrow":
        with pa.memory_map(str(path)) as source:
            try:
                yield from (batch.nbytes for batch in pa.ipc.open_stream(source))
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                yield from (reader.get_batch(index).nbytes for index in range(reader.num_record_batches))
        return
    with pq.ParquetFile(path, memory_map=True) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        yield VALUE_BYTES * sum(column.num_values for column in columns)
        row = sum(column.total_uncompressed_size for column in columns) // max(1, file.metadata.num_rows)
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row)))
        yield from (batch.nbytes for batch in file.iter_batches(batch_size=rows, use_threads=False))
