# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from training to sampling processes, by NCCL or gloo.

When weights are published, each rank that trains gathers the buckets from the shards as for any transport,
and copies its share to page-locked host memory. From there a thread for each engine sends it, at any later
time: engines take weights between two of their steps, each when it can, while training continues.
`WeightReader` (`reader.py`) is the other end.

    rank 0 that trains   buckets 0 2 4 .. ──link──> engine 0, rank 0 ─┐ broadcast in
    rank 1 that trains   buckets 1 3 5 .. ──link──> engine 0, rank 1 ─┘ the engine
                                          ──link──> engine 1, ..

Why so:

- Links of two processes instead of a group of all, or of an engine and all ranks that train: a collective
  needs everyone at once, and fails with the first that is lost. Here engines do not know of each other, one
  that dies ends its links alone, and one that joins makes new ones. A broadcast would send fewer bytes, but a
  rank sends only its share: all engines get model x engines / ranks bytes from it.
- An engine asks for a version (pull), so that no one waits for an engine that is busy or dead.
- Host memory instead of the device's, which training needs; a GPU holds two pieces of 64 MiB for each engine
  that loads. The copies through PCIe take each rank's share only, and the second overlaps with sending.
- A process keeps the two newest versions: an engine that was told to load one may ask when the next is there.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from verl.distributed.device import host_buffer, is_gpu
from verl.distributed.weights import peer_link
from verl.distributed.weights.buckets import BucketLayout, NamedTensors, own_buckets
from verl.distributed.weights.peer_link import PIECE_BYTES, SENDER, PeerLink, ServerAddress
from verl.distributed.weights.peer_lost import PeerLostError

VERSIONS = 2  # kept
CLOSE_LIMIT_S = 10.0  # for a thread to end; NCCL may wait in vain for a process that died while it connected


@dataclass(frozen=True)
class ServedShare:
    """The buckets that a rank sends to whoever asks for them."""

    server: ServerAddress
    buckets: tuple[BucketLayout, ...]


@dataclass
class HeldShare:
    """A rank's share of a version in host memory."""

    version: int = -1
    data: list[Tensor] = field(default_factory=list)  # of each bucket: its bytes
    ready: Any = None  # event of the device: the copies have ended
    num_sending: int = 0  # threads


class WeightServer:
    """Publishes the share of a rank that trains, and sends it to engines in threads of its own.

    Args:
        address: Of this process, as others reach it.
        on_lost: Called in a thread when an engine is lost while it takes weights.
        timeout_s: Seconds without progress after which an engine counts as lost.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        address: str,
        *,
        on_lost: Callable[[PeerLostError], None],
        bucket_bytes: int = PIECE_BYTES,
        timeout_s: float = peer_link.TIMEOUT_S,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.bucket_bytes, self.timeout_s, self.on_lost = bucket_bytes, timeout_s, on_lost
        self._listening = socket.create_server((address, 0))
        port = self._listening.getsockname()[1]
        self.address = ServerAddress(address, port, secrets.token_bytes(32))
        self._changed = threading.Condition()  # guards everything below
        self._shares = [HeldShare() for _ in range(VERSIONS)]  # the oldest first
        self._connections: dict[Connection, threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept, name="weight server", daemon=True)
        self._accepting.start()

    def publish(self, version: int, named_tensors: NamedTensors) -> ServedShare:
        """Keep this rank's share of full tensors, which every rank iterates in the same order to the end.

        Waits neither for the device nor for engines, unless one still takes the share before the last.
        """
        with self._changed:
            share = self._shares.pop(0)
            self._changed.wait_for(lambda: not share.num_sending)  # which ends or fails in time
        buffers, share.data, layouts = iter(share.data), [], []
        for number, bucket in own_buckets(named_tensors, self.rank, self.world_size, self.bucket_bytes):
            layouts.append(BucketLayout.of(number, bucket))
            share.data.append(self._filled(next(buffers, None), layouts[-1], bucket))
        share.version = version
        if is_gpu(self.device):
            share.ready = torch.get_device_module(self.device).current_stream().record_event()
        with self._changed:
            self._shares.append(share)
        return ServedShare(self.address, tuple(layouts))

    def close(self) -> None:
        """End the threads and links; engines that ask for weights later get an error."""
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join()
        self._listening.close()
        with self._changed:
            threads = dict(self._connections)
            for connection in threads:
                peer_link.hang_up(connection)
        for thread in threads.values():
            thread.join(CLOSE_LIMIT_S)

    def _filled(
        self, buffer: Tensor | None, layout: BucketLayout, bucket: Iterable[tuple[str, Tensor]]
    ) -> Tensor:
        if buffer is None or buffer.nbytes != layout.num_bytes:
            buffer = host_buffer(layout.num_bytes, self.device, self)
        for (_, place), (_, tensor) in zip(layout.views(buffer), bucket, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        return buffer

    def _accept(self) -> None:
        for number in count():
            try:
                accepted, _ = self._listening.accept()
            except OSError:  # `close`
                return
            connection = Connection(accepted.detach())
            thread = threading.Thread(
                target=self._serve, args=(connection,), name=f"weight link {number}", daemon=True
            )
            with self._changed:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        """Send shares to an engine until it closes its connection."""
        try:
            peer_link.authenticate(connection, self.address.key)
            link = PeerLink(connection, SENDER, self.device, self.address.host, self.timeout_s)
            try:
                while (version := self._next_request(link)) is not None:
                    self._send(link, version)
            finally:
                link.close()
        except PeerLostError as error:
            self.on_lost(error)
        finally:
            with self._changed:  # `close` uses open ones
                del self._connections[connection]
                connection.close()

    def _next_request(self, link: PeerLink) -> int | None:
        """Wait for the next version that an engine wants; None if it has left."""
        with suppress(PeerLostError):
            return link.receive_message()
        return None

    def _send(self, link: PeerLink, version: int) -> None:
        with self._changed:
            share = next((share for share in self._shares if share.version == version), None)
            if share is not None:
                share.num_sending += 1
        link.send_message(share is not None)
        if share is None:
            return
        try:
            for data in share.data:
                link.send(data, share.ready)
        finally:
            with self._changed:
                share.num_sending -= 1
                self._changed.notify_all()
