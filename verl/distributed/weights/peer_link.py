# SPDX-License-Identifier: Apache-2.0
"""A link between two processes that may each end at any time: tensors one way, and messages.

It is a TCP connection and a process group of two next to torch's default group: gloo between CPUs, NCCL
between GPUs. The connection carries messages, and its end is how a process learns of the other's death; a
kernel of NCCL that waits for a dead peer would never learn of it. Everything has a time limit, and whatever
goes wrong on the way is a `PeerLostError`.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, Work  # pyright: ignore[reportPrivateImportUsage] - its documented place

from verl.distributed.device import backend_of, is_gpu
from verl.distributed.weights.peer_lost import PeerLostError

PIECE_BYTES = 64 << 20  # sent at once; the sender's GPU holds two pieces
POLL_S = 0.001  # between looks at a transfer of a GPU
TIMEOUT_S = 300.0  # without progress; the controller ends stopped processes much earlier
SENDER, RECEIVER = 0, 1
TAG = 0
# Read when a group is made. NCCL's groups then have no thread that ends the whole process when a transfer
# fails: `wait` raises instead.
WAIT_RAISES = "TORCH_NCCL_BLOCKING_WAIT"


class ServerAddress(NamedTuple):
    """Where a process that sends is reached."""

    host: str
    port: int  # of its connections
    key: bytes  # shared by the processes of a run


class PeerLink:
    """One end of a link; the calls at both ends match."""

    def __init__(
        self,
        connection: Connection,  # to the other end
        rank: int,
        device: torch.device,
        address: str,  # own, for gloo
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.store, self.device, self.timeout_s = ConnectionStore(connection, timeout_s), device, timeout_s
        self.peer = RECEIVER if rank == SENDER else SENDER
        with _lost("a weight link broke"):
            self.group = make_group(self.store, rank, device, address, timedelta(seconds=timeout_s))
        self.stream = torch.get_device_module(device).Stream(device) if is_gpu(device) else None

    def send(self, data: Tensor, ready: Any = None) -> None:
        """Send bytes (N,) of host memory; on a GPU they are there once the event `ready` is past."""
        with _lost("a weight link broke"), self._on_stream():
            if self.stream is not None and ready is not None:
                self.stream.wait_event(ready)
            before: tuple[Work, Tensor] | None = None
            for piece in data.split(PIECE_BYTES):
                staged = piece.to(self.device, non_blocking=True)
                sending = self.group.send([staged], self.peer, TAG), staged
                if before is not None:
                    self._wait(before[0])
                before = sending
            if before is not None:
                self._wait(before[0])

    def post_receive(self, data: Tensor) -> list[Work]:
        """Begin to receive bytes into a tensor (N,) of the device; `finish_receive` ends it."""
        with _lost("a weight link broke"):
            return [self.group.recv([piece], self.peer, TAG) for piece in data.split(PIECE_BYTES)]

    def finish_receive(self, works: list[Work]) -> None:
        with _lost("a weight link broke"):
            for work in works:
                self._wait(work)

    def send_message(self, message: Any) -> None:
        with _lost("a weight link broke"):
            self.store.connection.send(message)

    def receive_message(self, timeout_s: float | None = None) -> Any:
        """Wait for a message; None waits as long as the other end lives."""
        with _lost("a weight link broke"):
            return self.store.receive(timeout_s)

    def close(self) -> None:
        """End the process group; the connection belongs to the caller."""
        if is_gpu(self.device):
            self.group.abort()  # a transfer that waits for a dead peer would block its stream
        del self.group

    def _wait(self, work: Work) -> None:
        if self.stream is not None:  # gloo notices a closed connection itself
            give_up = time.monotonic() + self.timeout_s
            while not work.is_completed():
                self.store.check_open(POLL_S)
                if time.monotonic() >= give_up:
                    raise TimeoutError(f"no progress for {self.timeout_s:g} seconds")
        work.wait()

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self.stream is None:
            return nullcontext()
        return torch.get_device_module(self.device).stream(self.stream)  # not the one that trains


def make_group(store: Store, rank: int, device: torch.device, address: str, timeout: timedelta) -> Any:
    """Make a group of two that torch's default group does not know."""
    collective = backend_of(device).collective
    if collective == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _environment(WAIT_RAISES, "1"):
            return dist.ProcessGroupNCCL(store, rank, 2, options)
    if collective == "gloo":
        gloo: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - not in its stub
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo._timeout, gloo._threads = timeout, 1
        return dist.ProcessGroupGloo(store, rank, 2, gloo)
    raise NotImplementedError(f"`worker.rollout.weight_transport=collective` on {device.type}")


def authenticate(connection: Connection, key: bytes) -> None:
    """Check that a process that has connected is of this run."""
    with _lost("a process that connected is not of this run, or is gone"):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)


def connect(server: ServerAddress, timeout_s: float = TIMEOUT_S) -> Connection:
    with _lost(f"no weight link to {server.host}:{server.port}"):
        connected = socket.create_connection(server[:2], timeout_s)
        connected.settimeout(None)
        connection = Connection(connected.detach())
        answer_challenge(connection, server.key)
        deliver_challenge(connection, server.key)
    return connection


def hang_up(connection: Connection) -> None:
    """Wake the thread that reads a connection: it sees the end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared, suppress(OSError):  # the peer has left
        shared.shutdown(socket.SHUT_RDWR)


@contextmanager
def _lost(what: str) -> Iterator[None]:
    """Raise a PeerLostError that says what was lost; torch.distributed raises RuntimeErrors."""
    try:
        yield
    except (AuthenticationError, EOFError, OSError, RuntimeError) as error:
        raise PeerLostError(f"{what}: {error}") from error


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


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
        self._messages: deque[Any] = deque()  # that came while others waited for keys, or for a transfer

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next message; None waits until the connection ends."""
        while not self._messages:
            if not self.connection.poll(timeout_s):
                raise TimeoutError(f"no answer for {timeout_s:g} seconds")
            self._take()
        return self._messages.popleft()

    def check_open(self, wait_s: float) -> None:
        """Raise an EOFError if the connection has ended, or ends within a time."""
        if self.connection.poll(wait_s):
            self._take()

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
            self._take()

    def _take(self) -> None:
        taken = self.connection.recv()
        if isinstance(taken, Entry):
            self._known[taken.key] = taken.value
        else:
            self._messages.append(taken)
