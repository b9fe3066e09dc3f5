# SPDX-License-Identifier: Apache-2.0
"""Faster imports of heavy packages: in a thread next to other work, and without garbage collection."""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection inside the block, for imports, and spare what they made from later collections.

    Imports make objects by the million, which live as long as the process. Searching them again and again
    takes a fifth of the time that torch, transformers and vLLM need to load.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def importing(*modules: str) -> Iterator[None]:
    """Import modules in a thread while the block runs; leaving waits for them.

    The block must not import what the modules import: two threads that enter a cycle of imports from both ends
    can see half a module. An import that fails raises again where it is next asked for.
    """
    thread = Thread(target=_import_all, args=modules, name="imports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import_all(*modules: str) -> None:
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
