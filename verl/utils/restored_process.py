# SPDX-License-Identifier: Apache-2.0
"""Restoring a process of the user's after a run in it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.rank_logger import ROOT, get_logger


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore the environment, and remove the handler of our loggers if there was none before."""
    environment = dict(os.environ)
    root = logging.getLogger(ROOT)
    handlers, level = list(root.handlers), root.level
    get_logger(ROOT)  # after another run has removed its handler
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
