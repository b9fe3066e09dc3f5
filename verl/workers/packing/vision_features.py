# SPDX-License-Identifier: Apache-2.0
"""Features of a vision tower, computed once, or once for each step's prompts if it is trained.

They are kept in the node's media cache, and in a folder if there is one, under a name made of the medium's
content, the options that shape the model's inputs, and the tower's weights. The rollout engine, the passes
over the responses and every update read those of a frozen tower; none of these runs it. Those of a tower that
is trained are for an engine without one.
"""

import hashlib
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from verl.data.media.cache import Entry, MediaFolder
from verl.data.media.loader import MediaData, MediaLoader, references_in_order
from verl.data.media.references import Reference
from verl.distributed.device import to_device
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.families.interface import KINDS, EncodedMedium, Kind, Medium, is_part
from verl.models.families.registry import media_family_of
from verl.models.flops import FlopsCounter, PackedWork
from verl.models.monkey_patch import evaluating
from verl.models.vision import Features, MediaShare, share_media
from verl.workers.packing.micro_batches import max_over_ranks

FEATURES_AT_ONCE = 1 << 14  # on a rank, in one call of the tower; a frame or tile with more runs alone
FEATURES = "features"  # (tokens, hidden size x (1 + levels)), stored with the medium's facts
FORMAT = "2"  # of stored features; change it with their content


class UnitRange(NamedTuple):
    """Consecutive frames or tiles of a medium."""

    key: str
    first: int
    stop: int
    is_last: bool


class FrozenTower:
    """Features of media under the frozen vision tower of one model.

    `encode` and `holding` are collective: under FSDP all ranks must run the tower equally often.

    Example::

        tower = FrozenTower(model, media_loader, device, torch.bfloat16)
        tower.encode(rows)  # other ranks of the node find the result
        with tower.holding(rows):  # `PackedForward` reads them
            forward.log_probs(micro, temperature=1.0)
    """

    def __init__(
        self,
        model: PreTrainedModel,  # prepared, possibly under FSDP
        media: MediaLoader,  # its cache keeps the features
        device: torch.device | str,
        dtype: torch.dtype,  # the tower computes in it
        sp: SequenceParallel | None = None,  # the ranks with the same rows, which share the work
        folder: str | None = None,  # keeps features across runs
        flops: FlopsCounter | None = None,  # counts what this rank runs
    ) -> None:
        self.model, self.config, self.media = model, model.config, media
        self.family = media_family_of(self.config)
        self._blank = self.family.example(self.config, media.processor).media
        self.device, self.dtype = device, dtype
        self.sp, self.flops = sp or SequenceParallel(), flops
        self.num_encoded = 0
        self.held: dict[str, Entry] | None = None
        self._folder = None if folder is None else MediaFolder(folder)
        self._weights: str | None = None  # digest of the tower's weights

    def forget(self) -> None:
        # the weights were replaced: older features must not be found
        self._weights = None

    @contextmanager
    def holding(self, rows: Iterable[MediaData]) -> Iterator[None]:
        """Keep the features of the rows' media in memory inside the block."""
        self.held = self.encode(rows)
        try:
            yield
        finally:
            self.held = None

    def encode(self, rows: Iterable[MediaData]) -> dict[str, Entry]:
        """Compute missing features; return the features of the rows' media by name.

        Raises:
            ValueError: A file is missing or corrupt; the message names it.
        """
        weights = self._name_weights()
        media = {self._key(weights, *medium): medium for row in rows for medium in references_in_order(row)}
        found = {key: self._find(key) for key in media}
        missing = {key: media[key] for key in self._missing(found)}
        self.num_encoded += len(missing)
        return {key: entry for key, entry in found.items() if entry is not None} | self._compute(missing)

    def known(self, row: MediaData) -> dict[Kind, list[EncodedMedium]] | None:
        """Find the features of a row's media without computing any; None if one is missing."""
        if self._weights is None:
            return None  # nothing is encoded yet
        entries: dict[Kind, list[EncodedMedium]] = {kind: [] for kind in KINDS}
        for kind, ref in references_in_order(row):
            entry = self._find(self._key(self._weights, kind, ref))
            if entry is None:
                return None
            entries[kind].append(EncodedMedium(entry.tensors[FEATURES], entry.meta))
        return entries

    def features(self, rows: Iterable[MediaData], owned: Mapping[Kind, Tensor | None]) -> Features:
        """The held features of all rows' media, in order, on the device.

        Args:
            rows: Only media whose features are held.
            owned: Numbers of the features of each kind that are wanted, in their order; None: all.
        """
        assert self.held is not None and self._weights is not None, "inside `holding`"
        keys: dict[Kind, list[str]] = {}
        for kind, ref in itertools.chain.from_iterable(map(references_in_order, rows)):
            keys.setdefault(self.family.token_kind(kind), []).append(self._key(self._weights, kind, ref))
        held = {key: self.held[key].tensors[FEATURES] for key in itertools.chain(*keys.values())}
        features: Features = {}
        for kind, names in keys.items():
            numbers = owned[kind]
            if numbers is None:
                on_device = to_device({name: held[name] for name in names}, self.device)
                features[kind] = [on_device[name] for name in names]
            else:
                features[kind] = [to_device(_rows_of([held[name] for name in names], numbers), self.device)]
        return features

    def _find(self, key: str) -> Entry | None:
        entry = self.media.cache.get(key)
        if entry is None and self._folder is not None:
            entry = self._folder.get(key)
        return entry

    def _key(self, weights: str, kind: Kind, ref: Reference) -> str:
        name = f"{FORMAT} {weights} {self.media.feature_key(kind, ref)}"
        return hashlib.blake2b(name.encode(), digest_size=20).hexdigest()

    def _name_weights(self) -> str:
        """Return a digest of the tower's config and of its weights in the type it computes in; collective."""
        if self._weights is None:
            options = {name: value for name, value in self.config.to_dict().items() if name != "text_config"}
            digest = hashlib.blake2b(json.dumps(options, default=str).encode(), digest_size=20)
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            encoder = self.family.encoder
            for name, tensor in full_named_tensors(
                self.model, self.dtype, lambda name: is_part(name, encoder)
            ):
                if is_first:
                    digest.update(name.encode())
                    digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
            self._weights = _agreed(digest.hexdigest())
        return self._weights

    def _missing(self, found: Mapping[str, Entry | None]) -> list[str]:
        # missing on any rank of the sequence-parallel group, so that all of its ranks compute the same
        flags = torch.tensor([entry is None for entry in found.values()], dtype=torch.int32)
        if self.sp.group is not None and len(flags):
            flags = flags.to(self.device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.sp.group)
        return [key for key, flag in zip(found, flags.tolist(), strict=True) if flag]

    def _compute(self, media: Mapping[str, tuple[Kind, Reference]]) -> dict[str, Entry]:
        facts = {key: self._facts(kind, ref) for key, (kind, ref) in media.items()}
        units = {key: self.family.units(self.config, each) for key, each in facts.items()}
        calls = _tower_calls(units, FEATURES_AT_ONCE * self.sp.size)
        parts: dict[str, list[Tensor]] = {key: [] for key in media}
        entries: dict[str, Entry] = {}
        for number in range(max_over_ranks(len(calls))):
            ranges = calls[number] if number < len(calls) else []
            for part, features in zip(ranges, self._encode(ranges, media), strict=True):
                parts[part.key].append(features)
                if part.is_last:
                    whole = torch.cat(parts.pop(part.key))
                    entries[part.key] = self._publish(part.key, whole, facts[part.key])
        if entries and self.sp.group is not None:
            dist.barrier(group=self.sp.group)  # the next call finds what one rank has published
        return entries

    def _facts(self, kind: Kind, ref: Reference) -> dict[str, Any]:
        # what the rollout engine reads in addition to the features
        [shape] = self.media.measure({f"{kind}s": [ref]}).of(kind)
        return shape.facts

    def _encode(self, ranges: list[UnitRange], media: Mapping[str, tuple[Kind, Reference]]) -> list[Tensor]:
        # without units, an unused blank image: all ranks must run the tower
        inputs = [
            self.family.cut(self.config, self.media.medium(*media[part.key]), part.first, part.stop)
            for part in ranges
        ] or self._blank
        share = None
        if self.sp.size > 1:
            inputs, share = share_media(self.family, self.config, inputs, self.sp, self._blank)
        return self.run(inputs, share)[: len(ranges)]

    def run(self, media: Sequence[Medium], share: MediaShare | None = None) -> list[Tensor]:
        """Compute the features of media on the host, without looking for known ones; collective."""
        inputs = to_device(list(media), self.device)
        if self.flops is not None:
            self.flops.add(PackedWork(()), media)
        with evaluating(self.model):
            encoded: list[Tensor] = self.model(media=inputs, media_share=share, only_encode=True)
        return [part.cpu() for part in encoded]

    def _publish(self, key: str, features: Tensor, facts: dict[str, Any]) -> Entry:
        # one rank of the sequence-parallel group writes
        entry = Entry({FEATURES: features}, facts)
        if self.sp.index != 0:
            return entry
        folder = self._folder
        return self.media.cache.get_or_make(
            key, lambda: entry if folder is None else folder.get_or_make(key, lambda: entry)
        )


class TrainedTower(FrozenTower):
    """Features of media under weights that change; `forget` after each change."""

    def _name_weights(self) -> str:
        if self._weights is None:
            self._weights = _agreed(uuid.uuid4().hex)
        return self._weights


def _rows_of(parts: Sequence[Tensor], numbers: Tensor) -> Tensor:
    """Select rows (m, D) of the concatenation of tensors (n, D), which is not made."""
    selected = parts[0].new_empty(len(numbers), *parts[0].shape[1:])
    first = 0
    for part in parts:
        [places] = torch.where((numbers >= first) & (numbers < first + len(part)))
        selected[places] = part[numbers[places] - first]
        first += len(part)
    return selected


def _agreed(name: str) -> str:
    # that of the first rank; collective
    names = [name]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    return names[0]


def _tower_calls(units: Mapping[str, list[int]], limit: int) -> list[list[UnitRange]]:
    """Divide the units of all media, in order, into calls of at most `limit` features but at least a unit."""
    calls: list[list[UnitRange]] = []
    room = 0
    for key, sizes in units.items():
        first = 0
        while first < len(sizes):
            if room < sizes[first]:
                calls.append([])
                room = max(limit, sizes[first])
            stop = first
            while stop < len(sizes) and sizes[stop] <= room:
                room -= sizes[stop]
                stop += 1
            calls[-1].append(UnitRange(key, first, stop, stop == len(sizes)))
            first = stop
    return calls
