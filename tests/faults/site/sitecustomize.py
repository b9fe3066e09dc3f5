# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH of a run this makes SIGUSR2 an exception, wherever the main thread of a process is."""

import signal


def fail(number, frame):
    raise ValueError("raised from outside")


signal.signal(signal.SIGUSR2, fail)
