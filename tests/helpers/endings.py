# SPDX-License-Identifier: Apache-2.0
"""Ways in which a process ends or hangs; imports nothing, so that a fresh interpreter starts quickly."""

import ctypes
import faulthandler
import os
import signal
import time

ACTIONS = {
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
}
ENDINGS = {"abort": "SIGABRT", "segfault": "SIGSEGV", "kill": "SIGKILL"}


def do(action: str) -> None:
    """Perform an action without printing a stack."""
    faulthandler.disable()
    ACTIONS[action]()
