# SPDX-License-Identifier: Apache-2.0
"""Faster imports of heavy packages: in a thread next to other work, and without garbage collection."""

import atexit
import gc
import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection inside the block, for imports, and exempt what they made from later ones.

    Imports make objects by the million, which live as long as the process. Searching them again and again
    takes a fifth of the time that torch, transformers and vLLM need to load.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # some packages complain at exit of what was never collected
        if was_enabled:
            gc.enable()


@contextmanager
def importing(*modules: str) -> Iterator[Callable[[str], object]]:
    """Import modules in a thread while the block runs; leaving waits for them.

    Yields a function that waits for one of them. Before, the block must not import what the modules import:
    two threads that enter a cycle of imports from both ends can see half a module. An import that fails
    raises where the module is next imported.
    """
    with ThreadPoolExecutor(1, "imports") as thread:
        imports = {name: thread.submit(importlib.import_module, name) for name in modules}
        yield lambda name: wait([imports[name]])


def deferred(module: str, function: str) -> Callable[..., Any]:
    """Return a function of a module that is imported when the function is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)

    return call
