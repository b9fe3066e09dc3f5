# SPDX-License-Identifier: Apache-2.0
"""Seconds that processes compute, which depend little on what else the machine does."""

import resource


def seconds_of_children() -> float:
    """Return the seconds of the processors that the child processes used which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
