# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from training to sampling processes, by NCCL or gloo.

When weights are published, each rank that trains gathers the buckets from the shards as for any transport,
and copies its share to page-locked host memory. From there a thread for each engine sends it, at any later
time: engines take weights between two of their steps, each when it can, while training continues.
`WeightReader` is the other end.

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
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from verl.distributed.device import host_buffer, is_gpu
from verl.distributed.weights import peer_link
from verl.distributed.weights.buckets import BucketLayout, NamedTensors, own_buckets
from verl.distributed.weights.peer_link import PIECE_BYTES, RECEIVER, SENDER, PeerLink, ServerAddress
from verl.distributed.weights.peer_lost import PeerLostError

VERSIONS = 2  # kept
GONE, COMES = "gone", "comes"  # answers to an engine's request
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
    layouts: tuple[BucketLayout, ...] = ()
    data: list[Tensor] = field(default_factory=list)  # of each bucket: its bytes
    ready: Any = None  # event of the device: the copies have ended
    num_sending: int = 0  # threads


class Traffic(NamedTuple):
    """Bytes of weights that went to engines."""

    sent: int = 0
    whole: int = 0  # if all weights had been sent each time


class WeightServer:
    """Publishes the share of a rank that trains, and sends it to engines in threads of its own."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        address: str,  # of this process, as others reach it
        *,
        on_lost: Callable[[PeerLostError], None],  # in a thread, if an engine is lost while it takes weights
        bucket_bytes: int = PIECE_BYTES,
        timeout_s: float = peer_link.TIMEOUT_S,  # without progress, until an engine counts as lost
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.bucket_bytes, self.timeout_s, self.on_lost = bucket_bytes, timeout_s, on_lost
        self._listening = socket.create_server((address, 0))
        port = self._listening.getsockname()[1]
        self.address = ServerAddress(address, port, secrets.token_bytes(32))
        self._changed = threading.Condition()  # guards everything below
        self._shares = [HeldShare() for _ in range(VERSIONS)]  # the oldest first
        self._traffic = Traffic()
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
        share.version, share.layouts = version, tuple(layouts)
        if is_gpu(self.device):
            share.ready = torch.get_device_module(self.device).current_stream().record_event()
        with self._changed:
            self._shares.append(share)
        return ServedShare(self.address, share.layouts)

    def take_traffic(self) -> Traffic:
        """Return what engines were sent since the last call."""
        with self._changed:
            taken, self._traffic = self._traffic, Traffic()
        return taken

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
            buffer = host_buffer(layout.num_bytes, self.device, self).zero_()  # gaps between tensors too
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
                while (request := self._next_request(link)) is not None:
                    self._answer(link, request)
            finally:
                link.close()
        except PeerLostError as error:
            self.on_lost(error)
        finally:
            with self._changed:  # `close` uses open ones
                del self._connections[connection]
                connection.close()

    def _next_request(self, link: PeerLink) -> Any:
        """Wait for the next `WeightReader._request` of an engine; None if it has left."""
        with suppress(PeerLostError):
            return link.receive_message()
        return None

    def _answer(self, link: PeerLink, request: Any) -> None:
        """Send the version that an engine asks for."""
        with self._kept(request) as share:
            link.send_message(GONE if share is None else COMES)
            if share is not None:
                self._send(link, share, share.data)

    def _send(self, link: PeerLink, share: HeldShare, data: Iterable[Tensor]) -> None:
        """Send `data` for the buckets of a share."""
        for whole, each in zip(share.data, data, strict=True):
            with self._changed:
                before = self._traffic
                self._traffic = Traffic(before.sent + each.nbytes, before.whole + whole.nbytes)
            link.send(each, share.ready)

    @contextmanager
    def _kept(self, version: int | None) -> Iterator[HeldShare | None]:
        """Keep the share of a version as it is inside the block; None if newer ones have its memory."""
        with self._changed:
            share = next((share for share in self._shares if share.version == version), None)
            if share is not None:
                share.num_sending += 1
        try:
            yield share
        finally:
            with self._changed:
                if share is not None:
                    share.num_sending -= 1
                self._changed.notify_all()


class Arriving(NamedTuple):
    """A bucket on its way."""

    layout: BucketLayout
    data: Tensor  # (num_bytes,) uint8, on the device
    source: int  # rank that trains
    works: list[Work]  # empty on ranks that get it by a broadcast


class WeightReader:
    """Reads published weights on a rank of an engine; all its ranks read at the same time.

    Rank r of the engine gets the shares of every `world_size`-th rank that trains, beginning with r, and
    broadcasts them to the others.
    """

    def __init__(
        self,
        rank: int,  # in the engine's process group, torch's default one
        world_size: int,
        device: torch.device,
        address: str,  # of this process, as others reach it
        timeout_s: float = peer_link.TIMEOUT_S,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.address, self.timeout_s = address, timeout_s
        self._memory = RecycledMemory(device)
        self._links: dict[ServerAddress, PeerLink] = {}

    def named_tensors(self, version: int, shares: Sequence[ServedShare]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors on the device; every rank of the engine iterates to the end.

        A bucket arrives while the engine loads the one before.

        Raises:
            PeerLostError: A process that trains is gone, or keeps this version no more.
        """
        links = self._requested(version, shares)
        ordered = sorted(
            ((layout, source) for source, share in enumerate(shares) for layout in share.buckets),
            key=lambda each: each[0].number,
        )
        arriving = self._post(*ordered[0], links)
        for _, following in pairwise([*ordered, None]):
            layout, data = arriving.layout, self._arrived(arriving, links)
            if following is not None:
                arriving = self._post(*following, links)
            yield from layout.views(data)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
            link.store.connection.close()
        self._links.clear()

    def _requested(self, version: int, shares: Sequence[ServedShare]) -> dict[int, PeerLink]:
        """Ask the processes that this rank reads from to send their shares; return the links to them."""
        links = {
            source: self._link_to(share.server)
            for source, share in enumerate(shares)
            if source % self.world_size == self.rank
        }
        for link in links.values():
            link.send_message(self._request(version))
        for source, link in links.items():
            if link.receive_message(self.timeout_s) == GONE:
                raise PeerLostError(f"training rank {source} has newer weights than version {version}")
        return links

    def _request(self, version: int) -> Any:
        """Return the message that asks for a version."""
        return version

    def _link_to(self, server: ServerAddress) -> PeerLink:
        if server not in self._links:
            connection = peer_link.connect(server, self.timeout_s)
            self._links[server] = PeerLink(connection, RECEIVER, self.device, self.address, self.timeout_s)
        return self._links[server]

    def _post(self, layout: BucketLayout, source: int, links: dict[int, PeerLink]) -> Arriving:
        data = self._memory.take(layout.num_bytes)
        works = links[source].post_receive(data) if source in links else []
        return Arriving(layout, data, source, works)

    def _arrived(self, arriving: Arriving, links: dict[int, PeerLink]) -> Tensor:
        source, data = arriving.source, arriving.data
        if source in links:
            links[source].finish_receive(arriving.works)
            data = self._whole(arriving)
        if self.world_size > 1:
            dist.broadcast(data, src=source % self.world_size)
        return data

    def _whole(self, arrived: Arriving) -> Tensor:
        """Return the bytes (num_bytes,) of a bucket, on the device."""
        return arrived.data


class RecycledMemory:
    """Lends tensors of bytes on a device; any of their views keeps them.

    A GPU's allocator does this itself. On CPU large blocks go back to the system, and filling new ones takes
    longer than receiving what is put there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[np.ndarray] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return a tensor (num_bytes,) uint8 of any values."""
        if self.device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        block = self._free.pop() if self._free else np.empty(0, np.uint8)
        if block.nbytes < num_bytes:
            block = np.empty(num_bytes, np.uint8)
        lent = block[:num_bytes]  # an object of its own, which the tensor's memory refers to
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.from_numpy(lent)
