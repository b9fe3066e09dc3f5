# SPDX-License-Identifier: Apache-2.0
"""Processes that end when the one that started them does, however that ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when its parent ends; elsewhere nothing does.

    Args:
        parent_pid: As the parent itself knew it: if it has ended meanwhile, so does this process, at once.
        number: The signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before the line above
        os._exit(1)
