# SPDX-License-Identifier: Apache-2.0
"""The console of this process, shared by its start-up, steps and end: no line breaks into another."""

import os
import sys
from functools import cache

from rich.console import Console
from rich.file_proxy import FileProxy


@cache
def stdout_console() -> Console:
    return Console(highlight=False)


@cache
def stderr_console() -> Console:
    """Return the console of what a person reads while another program reads stdout."""
    return Console(highlight=False, stderr=True)


def _use_plain_streams() -> None:
    """Give a forked process, such as one that reads rows, the streams below a live line.

    The thread that draws the line may have held the console's lock, which no one releases in the child.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


os.register_at_fork(after_in_child=_use_plain_streams)
