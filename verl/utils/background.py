# SPDX-License-Identifier: Apache-2.0
"""Work in threads that do not keep the process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str = "sampling") -> "Future[T]":
    """Run a function in a daemon thread and return its future."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the reader
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
