# SPDX-License-Identifier: Apache-2.0
"""Messages between an event loop and its child processes."""

import asyncio
import os
import pickle
import select
import socket
import struct
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

SIZE, LONG_SIZE = struct.Struct("!i"), struct.Struct("!iQ")  # of a message, as `Connection` sends it
FULL_WAIT_S = 0.005


class BadMessageError(Exception):
    """A child process sent a message that is too long or cannot be read."""


class ChildChannel:
    """The event loop's end of a `Connection`: a process that stops amid a message stops no other.

    Args:
        file: The descriptor of a socket; the channel keeps a copy.
        max_size: Maximum bytes of a message that is received.
    """

    def __init__(self, file: int, max_size: int) -> None:
        self.max_size = max_size
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(file))
        self._socket.setblocking(False)
        self._sending = asyncio.Lock()

    async def send(self, message: bytes) -> None:
        """Send a message; to a process that has died it is lost, and `receive` raises."""
        size = len(message)
        with suppress(OSError):
            async with self._sending:
                head = SIZE.pack(size) if size < 1 << 31 else LONG_SIZE.pack(-1, size)
                await self._loop.sock_sendall(self._socket, head)
                await self._loop.sock_sendall(self._socket, message)

    async def send_files(self, message: bytes, files: Sequence[int]) -> None:
        """Send a few bytes, without their length, together with open files."""
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._socket, [message], files)
                except BlockingIOError:  # the process has much to read
                    await asyncio.sleep(FULL_WAIT_S)
                except OSError:
                    return
                else:
                    return

    async def receive(self) -> Any:
        """Return the next message, unpickled; raises an EOFError or OSError when the process has ended."""
        (size,) = SIZE.unpack(await self._read(SIZE.size))
        if not 0 <= size <= self.max_size:
            raise BadMessageError(f"sent a message of more than {self.max_size >> 20} MiB")
        message = await self._read(size)
        try:
            return pickle.loads(message)
        except Exception as error:  # a user's function wrote to the connection
            raise BadMessageError(f"sent a message that cannot be read ({error!r:.200})") from error

    def has_input(self) -> bool:
        """Return whether there is something to receive, which may be the end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()

    async def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            part = await self._loop.sock_recv(self._socket, min(size - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one raises, then cancel the others and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
