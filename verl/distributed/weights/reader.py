# SPDX-License-Identifier: Apache-2.0
"""Takes weights from the processes that train into an engine's; `server.py` says how and why."""

import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from verl.distributed.weights import peer_link
from verl.distributed.weights.buckets import BucketLayout
from verl.distributed.weights.peer_link import RECEIVER, PeerLink, ServerAddress
from verl.distributed.weights.peer_lost import PeerLostError
from verl.distributed.weights.server import ServedShare


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

    Args:
        rank, world_size: In the engine's process group, torch's default one.
        address: Of this process, as others reach it.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        address: str,
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
            link.send_message(version)
        for source, link in links.items():
            if not link.receive_message(self.timeout_s):
                raise PeerLostError(f"training rank {source} has newer weights than version {version}")
        return links

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
        source = arriving.source
        if source in links:
            links[source].finish_receive(arriving.works)
        if self.world_size > 1:
            dist.broadcast(arriving.data, src=source % self.world_size)
        return arriving.data


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
