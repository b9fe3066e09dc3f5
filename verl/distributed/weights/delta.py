# SPDX-License-Identifier: Apache-2.0
"""Send only the weights that changed, by the links of `verl.distributed.weights.server`.

A rank that trains keeps its share of the two newest versions. An engine says which version it holds; if that
is the other one, the thread that sends looks for the changes of a bucket while the engine loads the one
before, and sends them or the whole bucket, whichever is smaller. They are found once for all engines. An
engine that has joined, or that missed a version, gets everything.

Each rank of an engine keeps in host memory the buckets that it reads: together one copy of the weights. There
it applies the changes, and loads whole tensors as with the other transports, since the weights in an engine
have other shapes, types and names.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from verl.distributed.device import host_buffer, is_gpu
from verl.distributed.weights.buckets import BucketLayout
from verl.distributed.weights.changes import Changes, Form, apply_changes, find_changes
from verl.distributed.weights.peer_link import PeerLink
from verl.distributed.weights.server import (
    COMES,
    GONE,
    Arriving,
    HeldShare,
    RecycledMemory,
    ServedShare,
    WeightReader,
    WeightServer,
)


class Request(NamedTuple):
    """The message by which an engine asks for weights."""

    version: int
    held: int | None  # version that it has; None before the first


class Found:
    """The changes between two versions, as far as a thread has looked for them."""

    def __init__(self) -> None:
        self._buckets: dict[int, Changes | None] = {}
        self._looking = threading.Lock()

    def changes(self, number: int, base: HeldShare | None, share: HeldShare) -> Changes | None:
        """Return the changes of a share's bucket, given by its place there; None to send all of it."""
        with self._looking:
            if number not in self._buckets and base is not None:
                self._buckets[number] = _changes_between(number, base, share)
            return self._buckets.get(number)


class DeltaServer(WeightServer):
    """Sends an engine the changes since the version that it holds."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._found: dict[Request, Found] = {}  # of versions that are kept
        super().__init__(*arguments, **options)

    def _answer(self, link: PeerLink, request: Request) -> None:
        with self._kept(request.version) as share:
            link.send_message(GONE if share is None else COMES)
            if share is not None:
                self._send(link, share, self._parts(link, request, share))

    def _parts(self, link: PeerLink, request: Request, share: HeldShare) -> Iterator[Tensor]:
        """Yield the bytes to send for each bucket, and send their form before."""
        with self._changed:
            kept = {each.version for each in self._shares}
            self._found = {each: found for each, found in self._found.items() if each.version in kept}
            found = self._found.setdefault(request, Found())
        for number, whole in enumerate(share.data):
            with self._kept(request.held) as base:  # not longer: training does not wait for a slow engine
                changes = found.changes(number, base, share)
            link.send_message(changes and changes.form)
            yield whole if changes is None else changes.data


class DeltaReader(WeightReader):
    """Reads the changes since the version that it holds, and yields whole tensors.

    What it yields must not be written to.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held: int | None = None
        self._buckets: dict[int, Tensor] = {}  # of the held version, by number: bytes in host memory
        self._forms: dict[int, Form | None] = {}  # of the buckets that this rank reads now, by number
        self._change_memory = RecycledMemory(self.device)

    def named_tensors(self, version: int, shares: Sequence[ServedShare]) -> Iterator[tuple[str, Tensor]]:
        yield from super().named_tensors(version, shares)
        self._held = version

    def _requested(self, version: int, shares: Sequence[ServedShare]) -> dict[int, PeerLink]:
        try:
            return super()._requested(version, shares)
        finally:
            self._held = None  # until everything has come

    def _request(self, version: int) -> Request:
        return Request(version, self._held)

    def _post(self, layout: BucketLayout, source: int, links: dict[int, PeerLink]) -> Arriving:
        form = links[source].receive_message(self.timeout_s) if source in links else None
        self._forms[layout.number] = form
        if form is None:
            return super()._post(layout, source, links)
        data = self._change_memory.take(form.num_bytes)
        return Arriving(layout, data, source, links[source].post_receive(data))

    def _whole(self, arrived: Arriving) -> Tensor:
        number, data, form = arrived.layout.number, arrived.data, self._forms[arrived.layout.number]
        on_device = is_gpu(self.device)
        if form is None:
            self._buckets[number] = self._in_host_memory(number, data) if on_device else data
            return data
        held = self._buckets[number]
        if on_device:
            apply_changes(held, form, data.cpu())
            return self._memory.take(held.nbytes).copy_(held)
        # the engine may still have views of what it was given before
        whole = self._buckets[number] = self._memory.take(held.nbytes).copy_(held)
        apply_changes(whole, form, data)
        return whole

    def _in_host_memory(self, number: int, data: Tensor) -> Tensor:
        buffer = self._buckets.get(number)
        if buffer is None or buffer.nbytes != data.nbytes:
            buffer = host_buffer(data.nbytes, self.device, self)
        return buffer.copy_(data)


def _changes_between(number: int, base: HeldShare, share: HeldShare) -> Changes | None:
    if number >= len(base.layouts) or base.layouts[number] != share.layouts[number]:
        return None  # holds other tensors
    for each in (base, share):
        if each.ready is not None:
            each.ready.synchronize()
    return find_changes(base.data[number], share.data[number])
