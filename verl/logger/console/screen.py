# SPDX-License-Identifier: Apache-2.0
"""The console of this process, shared by its start-up, steps and end: no line breaks into another."""

from functools import cache

from rich.console import Console


@cache
def stdout_console() -> Console:
    return Console(highlight=False)


@cache
def stderr_console() -> Console:
    """Return the console of what a person reads while another program reads stdout."""
    return Console(highlight=False, stderr=True)
