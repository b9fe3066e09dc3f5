# SPDX-License-Identifier: Apache-2.0
"""Check that the work of a reader grows linearly with its input."""

import time
from collections.abc import Callable

FACTOR = 4  # of the longer text: linear work grows by 4, quadratic by 16


def grows_with_length(read: Callable[[str], object], text: Callable[[int], str], size: int) -> bool:
    """Return whether the processor's time for `text(FACTOR * size)` is below twice its share by length.

    Times are the least of three; 10 ms are allowed for what a call costs in any case.
    """
    return _seconds(read, text(FACTOR * size)) < 2 * FACTOR * _seconds(read, text(size)) + 0.01


def _seconds(read: Callable[[str], object], text: str) -> float:
    def once() -> float:
        start = time.process_time()
        read(text)
        return time.process_time() - start

    return min(once() for _ in range(3))
