# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: mends imports that CUDA builds break, and signals that background jobs ignore."""

import gc
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from verl.utils.cuda_builds import repair_cuda_builds
from verl.utils.imports import collection_paused

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share the cores
repair_cuda_builds()


def listen_again(numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGHUP)) -> None:
    """Give the processes that tests start the default signals, also under `nohup` and in background jobs.

    Ignored signals are inherited; a handler is not: a program that is started gets the default again.
    The suite itself goes on when its terminal closes, as `nohup` promises.
    """
    for number in numbers:
        if signal.getsignal(number) == signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else lambda *_: None)


listen_again()


# Files whose tests start workers: one process of the suite has them all, so that Ray and the processes of
# whole runs start once.
ON_A_CLUSTER = re.compile(r"tests/(?:api|single_controller|trainer/test_|contract/test_bad_input)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the suite by files, but keep those together that start workers."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # there if this is called

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "workers" if ON_A_CLUSTER.match(nodeid) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without looking for garbage: half of the time, and none of it is found."""
    with collection_paused():
        result = yield
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave what a file has imported to no later search for garbage, of which engines begin many."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin each test with the same random numbers, so that none fails by chance."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
