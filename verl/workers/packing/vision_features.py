# SPDX-License-Identifier: Apache-2.0
"""A vision tower that is not trained: what it makes of an image or a video is computed once.

The features are kept by medium where every process of the node finds them, and in a folder if there is one,
under a name made of the medium's content, of all that shapes the model's inputs, and of the tower's weights.
The rollout engine, the passes over the responses and every update read them; none of these runs the tower.

Under FSDP all ranks must run the tower equally often, so computing is a call of its own (`encode`, `holding`)
that every rank takes part in, whatever it lacks.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.data.media.cache import Entry, MediaFolder
from verl.data.media.loader import MediaData, MediaLoader
from verl.data.media.references import Reference
from verl.distributed.fsdp import full_named_tensors
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.monkey_patch import evaluating
from verl.models.registry import model_type_of
from verl.models.vision import EncodedMedia, dummy_row, share_media
from verl.workers.packing.micro_batches import largest

PATCHES_AT_ONCE = 1 << 16  # on a rank, in one call of the tower; a frame with more goes alone
FEATURES = "features"  # (tokens, hidden size x (1 + levels)), beside what `_facts` tells of the medium


class Stretch(NamedTuple):
    """Consecutive frames of a medium; an image is one frame."""

    key: str
    first: int
    stop: int
    patches: int  # of a frame


class FrozenTower:
    """Features of media under the frozen vision tower of one model.

    Example::

        tower = FrozenTower(model, model.config, media_loader, device, torch.bfloat16)
        tower.encode(rows)  # every rank; what it has computed, others of the node find
        with tower.holding(rows):  # every rank; `PackedForward` reads them
            forward.log_probs(micro, temperature=1.0)

    Attributes:
        num_encoded: Media that were computed for this rank's line.
        held: Features by name inside `holding`, else None.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        media: MediaLoader,
        device: torch.device | str,
        dtype: torch.dtype,
        sp: SequenceParallel | None = None,
        folder: str | None = None,
    ) -> None:
        """Hold the model.

        Args:
            model: Prepared, possibly under FSDP; its tower does not change but by loading a checkpoint.
            config: Its transformers config.
            media: Makes the model's inputs; its cache keeps the features.
            device: Where the model computes.
            dtype: In which its tower computes.
            sp: The ranks that have the same rows; they share the work.
            folder: `worker.actor.cached_embeds_dir`: keeps features from run to run.
        """
        self.model, self.config, self.media = model, config, media
        self.device, self.dtype = device, dtype
        self.sp = sp or SequenceParallel.none()
        self.num_encoded = 0
        self.held: dict[str, Entry] | None = None
        self._folder = None if folder is None else MediaFolder(folder)
        self._weights: str | None = None  # names the tower's weights

    def forget(self) -> None:
        """The weights have been replaced: what was computed with others is not found any more."""
        self._weights = None

    @contextmanager
    def holding(self, rows: Iterable[MediaData]) -> Iterator[None]:
        """Have the features of the rows' media at hand inside the block; collective over all ranks."""
        self.held = self.encode(rows)
        try:
            yield
        finally:
            self.held = None

    def encode(self, rows: Iterable[MediaData]) -> dict[str, Entry]:
        """Compute what nobody has computed yet; collective over all ranks, with any rows on each.

        Returns:
            The features of the rows' media by name.

        Raises:
            ValueError: A file is missing or corrupt; the message names it.
        """
        weights = self._name_weights()
        media = {self._key(weights, *medium): medium for row in rows for medium in _media_of(row)}
        found = {key: self._known(key) for key in media}
        missing = {key: media[key] for key in self._lacking(found)}
        self.num_encoded += len(missing)
        return {key: entry for key, entry in found.items() if entry is not None} | self._computed(missing)

    def known(self, row: MediaData) -> dict[str, list[Entry]] | None:
        """The features of a row's images and videos, without computing any; None if one is missing.

        After an `encode`, which finds out what the weights are called.
        """
        assert self._weights is not None, "`encode` comes first"
        entries: dict[str, list[Entry]] = {"image": [], "video": []}
        for kind, ref in _media_of(row):
            entry = self._known(self._key(self._weights, kind, ref))
            if entry is None:
                return None
            entries[kind].append(entry)
        return entries

    def features(self, rows: Iterable[MediaData]) -> dict[str, EncodedMedia]:
        """The held features of all rows' images and of their videos, in order, on the device."""
        assert self.held is not None and self._weights is not None, "inside `holding`"
        on_device: dict[str, Tensor] = {}
        features: dict[str, list[Tensor]] = {}
        for kind, ref in itertools.chain.from_iterable(map(_media_of, rows)):
            key = self._key(self._weights, kind, ref)
            if key not in on_device:
                on_device[key] = self.held[key].tensors[FEATURES].to(self.device)
            features.setdefault(kind, []).append(on_device[key])
        hidden_size = self.config.get_text_config().hidden_size
        return {kind: EncodedMedia.of_joined(parts, hidden_size) for kind, parts in features.items()}

    # --- finding

    def _known(self, key: str) -> Entry | None:
        entry = self.media.cache.get(key)
        if entry is None and self._folder is not None:
            entry = self._folder.get(key)
        return entry

    def _keep(self, key: str, entry: Entry) -> Entry:
        return entry if self._folder is None else self._folder.get_or_make(key, lambda: entry)

    def _key(self, weights: str, kind: str, ref: Reference) -> str:
        name = f"{weights} {self.media.feature_key(kind, ref)}"
        return hashlib.blake2b(name.encode(), digest_size=20).hexdigest()

    def _name_weights(self) -> str:
        """A digest of the tower: its options, and its weights as they compute."""
        if self._weights is None:
            digest = hashlib.blake2b(self.config.vision_config.to_json_string().encode(), digest_size=20)
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            prefix = f"{model_type_of(self.config).vision_tower}."
            for name, tensor in full_named_tensors(
                self.model, self.dtype, lambda name: name.startswith(prefix)
            ):
                if is_first:
                    digest.update(name.encode())
                    digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
            names = [digest.hexdigest()]
            if dist.is_initialized():
                dist.broadcast_object_list(names, src=0)
            self._weights = names[0]
        return self._weights

    def _lacking(self, found: Mapping[str, Entry | None]) -> list[str]:
        """The names of what is missing on any rank of the line."""
        flags = torch.tensor([entry is None for entry in found.values()], dtype=torch.int32)
        if self.sp.group is not None and len(flags):
            flags = flags.to(self.device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.sp.group)
        return [key for key, flag in zip(found, flags.tolist(), strict=True) if flag]

    # --- computing

    def _computed(self, media: Mapping[str, tuple[str, Reference]]) -> dict[str, Entry]:
        facts = {key: self._facts(kind, ref) for key, (kind, ref) in media.items()}
        grids = {key: tuple(told["grid_thw"][0].tolist()) for key, told in facts.items()}
        rounds = _rounds(grids, PATCHES_AT_ONCE * self.sp.size)
        parts: dict[str, list[Tensor]] = {key: [] for key in media}
        entries: dict[str, Entry] = {}
        for number in range(largest(len(rounds))):
            stretches = rounds[number] if number < len(rounds) else []
            for stretch, features in zip(stretches, self._encoded(stretches, media), strict=True):
                parts[stretch.key].append(features)
                if stretch.stop == grids[stretch.key][0]:
                    whole = torch.cat(parts.pop(stretch.key))
                    entries[stretch.key] = self._published(stretch.key, whole, facts[stretch.key])
        if entries and self.sp.group is not None:
            dist.barrier(group=self.sp.group)  # the next call finds what one rank has published
        return entries

    def _facts(self, kind: str, ref: Reference) -> dict[str, Tensor]:
        """What the rollout engine wants to know of a medium beside its features."""
        shape = self.media.measure({f"{kind}s": [ref]})
        if kind == "image":
            return {"grid_thw": shape.image_grid_thw}  # (1, 3)
        return {
            "grid_thw": shape.video_grid_thw,  # (1, 3)
            "second_per_grid_ts": shape.second_per_grid_ts,  # (1,)
            "timestamps": torch.tensor(shape.timestamps[0], dtype=torch.float64),  # (temporal patches,)
        }

    def _encoded(self, stretches: list[Stretch], media: Mapping[str, tuple[str, Reference]]) -> list[Tensor]:
        """Features of the stretches on CPU, or of a blank image that nobody asked for."""
        inputs = self._inputs(stretches, media)
        share = None
        if self.sp.size > 1:
            inputs, share = share_media(self.config, inputs, self.sp)
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        with evaluating(self.model):
            encoded: EncodedMedia = self.model(**inputs, media_share=share, only_encode=True)["image"]
        return [part.cpu() for part in encoded.joined()[: len(stretches)]]

    def _inputs(
        self, stretches: list[Stretch], media: Mapping[str, tuple[str, Reference]]
    ) -> dict[str, Tensor]:
        """Pixels of the stretches; the tower does not tell images from videos."""
        if not stretches:
            return dummy_row(self.config).media
        pixels, grids = [], []
        for key, first, stop, patches in stretches:
            kind, ref = media[key]
            made = self.media.features_of(kind, ref)
            own, grid = (
                ("pixel_values", "image_grid_thw")
                if kind == "image"
                else ("pixel_values_videos", "video_grid_thw")
            )
            pixels.append(made[own][first * patches : stop * patches])
            grids.append(torch.cat([torch.tensor([[stop - first]]), made[grid][:, 1:]], 1))
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}

    def _published(self, key: str, features: Tensor, facts: dict[str, Tensor]) -> Entry:
        """Keep the features of a medium; one rank of the line does it."""
        entry = Entry({FEATURES: features, **facts}, {})
        if self.sp.index == 0:
            return self.media.cache.get_or_make(key, lambda: self._keep(key, entry))
        return entry


def _media_of(row: MediaData) -> Iterator[tuple[str, Reference]]:
    """A row's images, then its videos."""
    for kind in ("image", "video"):
        for ref in (row or {}).get(f"{kind}s") or ():
            yield kind, ref


def _rounds(grids: Mapping[str, tuple[int, ...]], limit: int) -> list[list[Stretch]]:
    """The frames of all media in order, in rounds of at most `limit` patches and at least one frame."""
    rounds: list[list[Stretch]] = []
    room = 0
    for key, (frames, height, width) in grids.items():
        first, patches = 0, height * width
        while first < frames:
            if room < patches:
                rounds.append([])
                room = max(limit, patches)
            stop = min(frames, first + room // patches)
            rounds[-1].append(Stretch(key, first, stop, patches))
            room -= (stop - first) * patches
            first = stop
    return rounds
