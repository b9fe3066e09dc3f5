# SPDX-License-Identifier: Apache-2.0
"""Load images, videos and audio: sizes from file headers, pixels and samples, and model inputs.

Rows carry references (paths, URLs or bytes). `MediaLoader` turns them into inputs of the rollout engine
(`decode`) and of the model (`media`). Both are cached, so that all processes of a node and all passes over
a batch share one decoding.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl.data.bad_rows import BadRowError
from verl.data.media.audio import AudioOptions, has_audio, read_audio
from verl.data.media.cache import Entry, MediaCache, MediaFolder
from verl.data.media.decoded import DecodedMedia, shape_of, video_shape, with_sound
from verl.data.media.download import DownloadFolder
from verl.data.media.references import MediaData, Reference, content_id, is_url, openable, payload, reading
from verl.data.media.sizes import (
    SIZES,
    MediaOptions,
    Options,
    process_image,
    resized_size,
    with_item_options,
    without_effect,
)
from verl.data.media.video import (
    SizeOptions,
    VideoInfo,
    VideoOptions,
    choose_frames,
    frame_size,
    probe_video,
    read_video,
    video_meta,
)
from verl.models.families.interface import KINDS, Kind, MediaFamily, MediaShape, Medium, MediumShape
from verl.models.families.registry import family_of_processor
from verl.utils.images import open_image, shown_size

# A model that reads the first of these knows the markers of all.
TOGETHER: tuple[tuple[Kind, ...], ...] = (("image", "video"), ("audio",))
BUDGET_VARIABLE = "MODEL_SEQ_LEN"  # read by qwen-vl-utils, whose limits frame sizes follow
# Change one when the content of its cached entries changes.
FORMAT = {"image": "5", "video": "2", "audio": "1"}


class MediaLoader:
    """Reads the media of prompts for one model.

    Example::

        loader = MediaLoader(processor, MediaOptions.from_data(config.data))
        images = loader.decode({"images": ["cat.png"]}).images

    Args:
        cache: None opens the one of `options.run_id`.
        family: That of the model; None is the family of the processor.
    """

    def __init__(
        self,
        processor: Any,
        options: MediaOptions,
        cache: MediaCache | None = None,
        family: MediaFamily | None = None,
    ) -> None:
        self.processor = processor
        self.family = family or family_of_processor(processor)
        self.cache = cache or MediaCache(options.run_id)
        self._folder = MediaFolder(options.cache_dir) if options.cache_dir is not None else None
        self._urls = None if options.urls is None else DownloadFolder(options.urls, self.cache.run_id)
        self._images = SizeOptions(options.min_pixels, options.max_pixels)
        self._videos = VideoOptions(
            options.min_pixels, options.max_pixels, self.family.frame_factor(processor), options.video_fps,
            options.num_video_frames, options.tokens_per_frame,
        )  # fmt: skip
        self._audio: AudioOptions | None = None
        if "audio" in self.family.kinds:
            extractor = processor.feature_extractor
            self._audio = AudioOptions(extractor.sampling_rate, extractor.chunk_length)
        self.hears_videos = options.hears_videos and self._audio is not None
        self._sized_by: dict[Kind, tuple[str, ...]] = {}
        self._check_budget(options.tokens_per_frame)
        if options.limits:
            self._check_effect(options.limits, self.family.kinds)
        names = ("image_processor", "video_processor", "feature_extractor")
        parts = (getattr(processor, name, None) for name in names)
        settings = "".join(part.to_json_string() for part in parts if part is not None)
        self._processor_options = hashlib.sha256((type(processor).__name__ + settings).encode()).hexdigest()

    def _check_budget(self, tokens_per_frame: int | None) -> None:
        smallest = self.family.smallest_frame(self.processor)
        if tokens_per_frame is not None and tokens_per_frame < smallest:
            raise ValueError(
                f"`tokens_per_frame` must be at least {smallest} for this model, got {tokens_per_frame}:"
                " its processor enlarges smaller frames"
            )
        # where every frame has `smallest` tokens, the limit holds without an effect
        if tokens_per_frame is not None and "video" in self.family.kinds and smallest == 1:
            self._check_effect(["tokens_per_frame"], ["video"])

    def _check_effect(self, names: Sequence[str], kinds: Sequence[Kind]) -> None:
        """Raise a ValueError if options that limit pixels change the tokens of none of these kinds."""
        sized_by = [self._sizing_options(kind) for kind in kinds]
        if all(sized_by):
            raise ValueError(without_effect(names, list(dict.fromkeys(itertools.chain(*sized_by)))))

    def _sizing_options(self, kind: Kind) -> tuple[str, ...]:
        if kind not in self._sized_by:
            self._sized_by[kind] = self.family.sized_by(self.processor, kind)
        return self._sized_by[kind]

    @property
    def readable(self) -> tuple[Kind, ...]:
        """The kinds of media whose markers in a prompt are not plain text."""
        return tuple(kind for kinds in TOGETHER if kinds[0] in self.family.kinds for kind in kinds)

    # --- files

    def on_disk(self, ref: Reference) -> Reference:
        """Return a local reference: a URL is fetched unless its file exists."""
        source = payload(ref)
        if not is_url(source):
            return ref
        if self._urls is None:
            raise ValueError(f"{source} was not fetched: set `data.allow_media_urls=true`")
        return (ref if isinstance(ref, dict) else {}) | {"path": self._urls.path(source), "url": source}

    def _local(self, media: MediaData, kind: str) -> list[Reference]:
        return [self.on_disk(ref) for ref in (media or {}).get(kind) or []]

    # --- sizes, without pixels

    def measure(self, media: MediaData) -> MediaShape:
        """Read the shapes of a row's media from file headers, without decoding."""
        sounds = self._local(media, "sounds") or itertools.repeat(None)
        return MediaShape(
            [self._seen(ref) for ref in self._local(media, "images")],
            [self._watched(*each) for each in zip(self._local(media, "videos"), sounds, strict=False)],
            # headers do not say how many samples there are
            [self._heard(len(self._samples(ref))) for ref in self._local(media, "audios")],
        )

    def _watched(self, video: Reference, sound: Reference | None) -> MediumShape:
        options, info = self._video_options(video), self._video_info(video)
        samples = None if sound is None else self._samples(sound)
        with reading("video", video):  # processors refuse some sizes
            indices = choose_frames(info, options)
            size = frame_size(len(indices), info.height, info.width, options)
            meta = with_sound(video_meta(info, indices, options), samples)
            return self.family.video_shape(self.processor, len(indices), *size, meta)

    def shape_of(self, decoded: DecodedMedia) -> MediaShape:
        return shape_of(self.family, self.processor, decoded)

    def expand(self, prompt_ids: list[int], shape: MediaShape) -> list[int]:
        """Replace the placeholder of each medium by its tokens."""
        return self.family.expand(self.processor, prompt_ids, shape)

    def with_order(self, media: MediaData, prompt_ids: Sequence[int]) -> MediaData:
        """Add to a row the `order` of its kinds of media in the prompt, if features depend on it."""
        present: list[Kind] = [kind for kind in KINDS if (media or {}).get(f"{kind}s")]
        if not media or len({self.family.token_kind(kind) for kind in present}) == len(present):
            return media
        kinds = self.family.placeholders(self.processor)
        return {**media, "order": [kinds[token] for token in prompt_ids if token in kinds]}

    def _seen(self, ref: Reference) -> MediumShape:
        options = self._image_options(ref)
        with reading("image", ref), open_image(openable(ref)) as image:
            width, height = self._image_size(options, image)
            return self.family.image_shape(self.processor, height, width)

    def _image_options(self, ref: Reference) -> SizeOptions:
        return self._with_own("image", self._images, ref)

    def _video_options(self, ref: Reference) -> VideoOptions:
        return self._with_own("video", self._videos, ref)

    def _with_own(self, kind: Kind, options: Options, ref: Reference) -> Options:
        names = [name for name in SIZES if ref.get(name) is not None] if isinstance(ref, dict) else []
        if names and (sized_by := self._sizing_options(kind)):
            raise BadRowError(f"the {kind} has {without_effect(names, sized_by)}")
        return with_item_options(options, ref)

    def _image_size(self, options: SizeOptions, image: Image.Image) -> tuple[int, int]:
        if options.size is None:
            return resized_size(*shown_size(image), options.min_pixels, options.max_pixels)
        height, width = self.family.resized_image(self.processor, *options.size)
        return width, height

    def _video_info(self, ref: Reference) -> VideoInfo:
        content = content_id("video", ref)

        def make() -> Entry:
            with reading("video", ref, content):
                return Entry({}, {"info": list(probe_video(payload(ref)))})

        return VideoInfo(*self._keep(self._key("video info", ref, content), make).meta["info"])

    # --- pixels

    def decode(self, media: MediaData) -> DecodedMedia:
        """Decode a row's media, once per node while the cache keeps them."""
        videos = [self._video(ref) for ref in self._local(media, "videos")]
        return DecodedMedia(
            [Image.fromarray(self._image(ref).numpy()) for ref in self._local(media, "images")],
            [(video.tensors["frames"].numpy(), video.meta) for video in videos],
            *(
                [(self._samples(ref), self._hearing.rate) for ref in self._local(media, kind)]
                for kind in ("audios", "sounds")
            ),
        )

    def media(self, media: MediaData) -> list[Medium]:
        """Return a row's media in the order of the prompt, as the model's encoders read them."""
        return [self.medium(kind, ref) for kind, ref in references_in_order(media)]

    def feature_key(self, kind: str, ref: Reference) -> str:
        """Return the cache key of the features of a medium, from its content and every option."""
        ref = self.on_disk(ref)
        return self._key(kind, ref, content_id(kind, ref), self._processor_options)

    def medium(self, kind: Kind, ref: Reference) -> Medium:
        """Return a medium as the model's encoder reads it."""
        ref = self.on_disk(ref)
        entry = self.cache.get_or_make(self.feature_key(kind, ref), lambda: self._processed(kind, ref))
        return Medium(kind, entry.tensors, entry.meta)

    def _image(self, ref: Reference) -> Tensor:
        options = self._image_options(ref)

        def make() -> Entry:
            with reading("image", ref), open_image(openable(ref)) as image:
                pixels = np.asarray(process_image(image, self._image_size(options, image)))
            return Entry({"pixels": torch.from_numpy(pixels.copy())}, {})

        key = self._key("image", ref, content_id("image", ref))
        return self.cache.get_or_make(key, make).tensors["pixels"]

    def _video(self, ref: Reference) -> Entry:
        content = content_id("video", ref)
        key = self._key("video", ref, content)

        def make() -> Entry:
            with reading("video", ref, content):
                video = read_video(payload(ref), self._video_options(ref))
            return Entry({"frames": torch.from_numpy(video.frames)}, video.meta)

        return self.cache.get_or_make(key, lambda: self._keep(key, make))

    @property
    def _hearing(self) -> AudioOptions:
        if self._audio is None:
            raise BadRowError("the row has audio, which the model cannot read")
        return self._audio

    def _samples(self, ref: Reference) -> np.ndarray:
        options = with_item_options(self._hearing, ref)

        def make() -> Entry:
            with reading("audio", ref):
                if isinstance(ref, dict) and ref.get("is_sound") and not has_audio(payload(ref)):
                    samples = self._silence(ref, options)
                else:
                    samples = read_audio(payload(ref), options)
            return Entry({"samples": torch.from_numpy(samples)}, {})

        key = self._key("audio", ref, content_id("audio", ref))
        return self.cache.get_or_make(key, make).tensors["samples"].numpy()

    def _silence(self, video: Reference, options: AudioOptions) -> np.ndarray:
        """Return silence of the length of a video without sound, or of its part."""
        info = self._video_info(video)
        end = min(info.num_frames / info.fps, options.audio_end or math.inf)
        seconds = end - (options.audio_start or 0.0)
        if seconds > options.longest_s:
            raise ValueError(f"it is longer than the {options.longest_s:g} s that the model hears")
        return np.zeros(max(1, round(seconds * options.rate)), dtype=np.float32)

    def _heard(self, num_samples: int) -> MediumShape:
        shape = self.family.audio_shape(self.processor, num_samples)
        if not shape.tokens:
            raise BadRowError(f"the audio has {num_samples} samples, too few for a token: leave the row out")
        return shape

    def _keep(self, key: str, make: Callable[[], Entry]) -> Entry:
        return make() if self._folder is None else self._folder.get_or_make(key, make)

    def _processed(self, kind: Kind, ref: Reference) -> Entry:
        family, processor = self.family, self.processor
        if kind == "image":
            image = Image.fromarray(self._image(ref).numpy())
            facts = family.image_shape(processor, image.height, image.width).facts
            return Entry(family.image_inputs(processor, image), facts)
        if kind == "video":
            video = self._video(ref)
            frames = video.tensors["frames"].numpy()
            facts = video_shape(family, processor, frames, video.meta).facts
            return Entry(family.video_inputs(processor, frames, video.meta), facts)
        samples = self._samples(ref)
        return Entry(family.audio_inputs(processor, samples), self._heard(len(samples)).facts)

    def _key(self, kind: str, ref: Reference, content: bytes, more: str = "") -> str:
        options: list[Any] = [FORMAT[kind.removesuffix(" info")]]
        if kind == "image":
            options.append(astuple(self._image_options(ref)))
        elif kind == "video":
            options += [astuple(self._video_options(ref)), os.environ.get(BUDGET_VARIABLE)]
        elif kind == "audio":
            options.append(astuple(with_item_options(self._hearing, ref)))
        digest = hashlib.blake2b(f"{kind} {json.dumps(options)} {more} ".encode(), digest_size=20)
        digest.update(content)
        return digest.hexdigest()


def references_in_order(media: MediaData) -> Iterator[tuple[Kind, Reference]]:
    """Yield a row's media in the order of the prompt: that of its `order`, or by kind.

    The sound of a video comes after it.
    """
    remaining = {kind: iter((media or {}).get(f"{kind}s") or ()) for kind in KINDS}
    sounds = iter(media["sounds"]) if media and media.get("sounds") else None
    for kind in kinds_in_order(media):
        yield kind, next(remaining[kind])
        if kind == "video" and sounds is not None:
            yield "audio", next(sounds)


def kinds_in_order(media: MediaData) -> list[Kind]:
    """Return the kinds of a row's media by the order of their markers; sounds of videos have none."""
    counts = {kind: len((media or {}).get(f"{kind}s") or ()) for kind in KINDS}
    order = (media or {}).get("order") or [kind for kind in KINDS for _ in range(counts[kind])]
    assert len(order) == sum(counts.values()), "`order` names the kind of each medium"
    return [KINDS[KINDS.index(name)] for name in order]
