# SPDX-License-Identifier: Apache-2.0
"""Send only the weights that changed, by the links of `verl.distributed.weights.server`.

A rank that trains keeps its share of the two newest versions. An engine says which version it holds; if that
is the other one, the thread that sends compares both and sends, for each bucket, the changes or all of it,
whichever is smaller. They are found once for all engines. An engine that has joined, or has another version,
gets everything.

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
    GONE,
    VERSIONS,
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


class Found(NamedTuple):
    """The changes of each bucket between two versions; None for one that is sent whole."""

    version: int
    since: int
    buckets: list[Changes | None]


class DeltaServer(WeightServer):
    """Sends an engine the changes since the version that it holds."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._finding = threading.Lock()  # guards what was found
        self._found: list[Found] = []  # the last ones
        super().__init__(*arguments, **options)

    def _answer(self, link: PeerLink, request: Request) -> None:
        with self._kept(request.version) as share:
            if share is None:
                link.send_message(GONE)
                return
            changes = self._changes(share, request.held)
            link.send_message([change and change.form for change in changes])
            buckets = zip(changes, share.data, strict=True)
            self._send(link, share, (whole if part is None else part.data for part, whole in buckets))

    def _changes(self, share: HeldShare, held: int | None) -> list[Changes | None]:
        everything: list[Changes | None] = [None] * len(share.data)
        if held is None:
            return everything
        with self._finding:
            for found in self._found:
                if (found.version, found.since) == (share.version, held):
                    return found.buckets
            with self._kept(held) as base:
                if base is None:
                    return everything
                found = Found(share.version, held, list(_changes_between(base, share)))
            self._found = [*self._found, found][-VERSIONS:]
        return found.buckets


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

    def _note_answer(self, share: ServedShare, answer: list[Form | None]) -> None:
        numbers = [layout.number for layout in share.buckets]
        self._forms.update(zip(numbers, answer, strict=True))

    def _post(self, layout: BucketLayout, source: int, links: dict[int, PeerLink]) -> Arriving:
        form = self._forms[layout.number] if source in links else None
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


def _changes_between(base: HeldShare, share: HeldShare) -> Iterator[Changes | None]:
    """Yield the changes of each bucket; None for one whose tensors are others, or that is sent whole."""
    for each in (base, share):
        if each.ready is not None:
            each.ready.synchronize()
    for number, (layout, new) in enumerate(zip(share.layouts, share.data, strict=True)):
        is_same = number < len(base.layouts) and base.layouts[number] == layout
        yield find_changes(base.data[number], new) if is_same else None
