# SPDX-License-Identifier: Apache-2.0
"""A connection between two processes: messages, and the addresses with which a process group begins.

A group of two needs no server of keys, such as torch's `TCPStore`: each process sends what it sets.
"""

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - its documented place


class Entry(NamedTuple):
    """A key that the other process has set."""

    key: str
    value: bytes


class ConnectionStore(Store):
    """The keys that two processes set, and their messages to each other; a thread of each uses it.

    Raises:
        EOFError, OSError: The connection has ended; a TimeoutError if nothing came in time.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        super().__init__()
        self.connection, self.timeout_s = connection, timeout_s
        self._known: dict[str, bytes] = {}

    def send(self, message: Any) -> None:
        self.connection.send(message)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next message; None waits until the connection ends."""
        while True:
            if not self.connection.poll(timeout_s):
                raise TimeoutError(f"no answer for {timeout_s:g} seconds")
            message = self.connection.recv()
            if not isinstance(message, Entry):
                return message
            self._known[message.key] = message.value

    def check_open(self, wait_s: float) -> None:
        """Raise an EOFError if the connection has ended, or ends within a time; no message is expected."""
        if self.connection.poll(wait_s):
            self._take_entry()

    # What follows, torch calls.

    def set(self, key: str, value: Any) -> None:
        self._known[key] = bytes(value)
        self.connection.send(Entry(key, bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def check(self, keys: list[str]) -> bool:
        return self._known.keys() >= set(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            if not self.connection.poll(self.timeout_s if timeout is None else timeout.total_seconds()):
                raise TimeoutError(f"no {keys} for {self.timeout_s:g} seconds")
            self._take_entry()

    def _take_entry(self) -> None:
        entry = self.connection.recv()
        assert isinstance(entry, Entry), f"between transfers only messages, got {entry!r}"
        self._known[entry.key] = entry.value
