# SPDX-License-Identifier: Apache-2.0
"""Imports what ranks of `tests.helpers.distributed` use, in the server that forks them.

Ranks inherit modules as they are: exempt from garbage collection, in memory that they share.
"""

import importlib

import tests.conftest  # noqa: F401 - lets transformers be imported
from verl.utils.imports import collection_paused

with collection_paused():
    for name in ("verl.workers.fsdp_worker", "verl.diffusion.worker"):
        importlib.import_module(name)
