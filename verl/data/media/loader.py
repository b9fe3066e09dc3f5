# SPDX-License-Identifier: Apache-2.0
"""Load images and videos: sizes from file headers, pixels, and model inputs.

Rows carry references (paths, URLs or bytes). `MediaLoader` turns them into inputs of the rollout engine
(`decode`) and of the model (`features`). Both are cached, so that all processes of a node and all passes over
a batch share one decoding.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl.data.media.cache import Entry, MediaCache, MediaFolder
from verl.data.media.download import DownloadFolder
from verl.data.media.item_options import with_item_options
from verl.data.media.references import Reference, content_id, is_url, openable, payload, reading
from verl.data.media.sizes import MediaOptions, image_grid, process_image, resized_size, video_grid
from verl.data.media.tokens import MediaShape, sampled_fps, timestamps
from verl.data.media.video import VideoInfo, choose_frames, frame_size, probe_video, read_video, video_meta

MediaData = Mapping[str, Sequence[Reference]] | None
BUDGET_VARIABLE = "MODEL_SEQ_LEN"  # read by qwen-vl-utils, whose limits frame sizes follow
FORMAT = {"image": "2", "video": "1"}  # change one when the content of its cached entries changes


@dataclass(frozen=True)
class DecodedMedia:
    """Pixels of one prompt's media, in the order of their markers."""

    images: list[Image.Image] = field(default_factory=list)  # RGB
    videos: list[tuple[np.ndarray, dict[str, Any]]] = field(default_factory=list)  # (T, H, W, 3) uint8, meta


class MediaLoader:
    """Reads the media of prompts for one model.

    Example::

        loader = MediaLoader(processor, MediaOptions.from_data(config.data))
        images = loader.decode({"images": ["cat.png"]}).images

    Args:
        cache: None opens the one of `options.run_id`.
    """

    def __init__(self, processor: Any, options: MediaOptions, cache: MediaCache | None = None) -> None:
        image_processor = getattr(processor, "image_processor", None)
        if not hasattr(processor, "video_processor") or not hasattr(image_processor, "merge_size"):
            raise NotImplementedError(
                f"{type(processor).__name__} is not supported: only the processors of Qwen2-VL, Qwen2.5-VL"
                " and Qwen3-VL are"
            )
        self.processor = processor
        self.cache = cache or MediaCache(options.run_id)
        self._folder = MediaFolder(options.cache_dir) if options.cache_dir is not None else None
        self._urls = None if options.urls is None else DownloadFolder(options.urls, self.cache.run_id)
        video = processor.video_processor
        self._images = options.of_images()
        self._videos = options.of_videos(video.patch_size * video.merge_size)
        options.check_budget(video)
        settings = processor.image_processor.to_json_string() + video.to_json_string()
        self._processor_options = hashlib.sha256((type(processor).__name__ + settings).encode()).hexdigest()

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
        images = [self._header_size(ref) for ref in self._local(media, "images")]
        return self._shape(images, [self._header_video(ref) for ref in self._local(media, "videos")])

    def shape_of(self, decoded: DecodedMedia) -> MediaShape:
        images = [(image.height, image.width) for image in decoded.images]
        return self._shape(images, [(*frames.shape[:3], meta) for frames, meta in decoded.videos])

    def _header_size(self, ref: Reference) -> tuple[int, int]:
        with reading("image", ref), Image.open(openable(ref)) as image:
            width, height = self._image_size(ref, image)
            return height, width

    def _image_size(self, ref: Reference, image: Image.Image) -> tuple[int, int]:
        options, processor = with_item_options(self._images, ref), self.processor.image_processor
        if options.size is None:
            return resized_size(image.width, image.height, options.min_pixels, options.max_pixels)
        _, rows, columns = image_grid(processor, *options.size)
        return columns * processor.patch_size, rows * processor.patch_size

    def _header_video(self, ref: Reference) -> tuple[int, int, int, dict[str, Any]]:
        info, options = self._video_info(ref), with_item_options(self._videos, ref)
        with reading("video", ref):
            indices = choose_frames(info, options)
            size = frame_size(len(indices), info.height, info.width, options)
            return len(indices), *size, video_meta(info, indices, options)

    def _video_info(self, ref: Reference) -> VideoInfo:
        content = content_id("video", ref)

        def make() -> Entry:
            with reading("video", ref, content):
                return Entry({}, {"info": list(probe_video(payload(ref)))})

        return VideoInfo(*self._keep(self._key("video info", ref, content), make).meta["info"])

    def _shape(
        self, images: list[tuple[int, int]], videos: list[tuple[int, int, int, dict[str, Any]]]
    ) -> MediaShape:
        patches = self.processor.video_processor.temporal_patch_size
        metas = [meta for *_, meta in videos]
        seconds = [patches / sampled_fps(meta) for meta in metas]
        return MediaShape(
            image_grid_thw=_grids([image_grid(self.processor.image_processor, *size) for size in images]),
            video_grid_thw=_grids([video_grid(self.processor.video_processor, *size) for *size, _ in videos]),
            second_per_grid_ts=torch.tensor(seconds, dtype=torch.float32),
            timestamps=[timestamps(meta, patches) for meta in metas],
        )

    # --- pixels

    def decode(self, media: MediaData) -> DecodedMedia:
        """Decode a row's media, once per node while the cache keeps them."""
        videos = [self._video(ref) for ref in self._local(media, "videos")]
        return DecodedMedia(
            [Image.fromarray(self._image(ref).numpy()) for ref in self._local(media, "images")],
            [(video.tensors["frames"].numpy(), video.meta) for video in videos],
        )

    def features(self, media: MediaData) -> dict[str, Tensor]:
        """Return the processor's outputs for a row's media: `pixel_values`, `image_grid_thw` and so on."""
        entries = [self._image_features(ref) for ref in self._local(media, "images")]
        entries += [self._video_features(ref) for ref in self._local(media, "videos")]
        names = dict.fromkeys(name for entry in entries for name in entry.tensors)
        parts = {name: [entry.tensors[name] for entry in entries if name in entry.tensors] for name in names}
        return {name: part[0] if len(part) == 1 else torch.cat(part) for name, part in parts.items()}

    def feature_key(self, kind: str, ref: Reference) -> str:
        """Return the cache key of the features of an image or a video, from its content and every option."""
        ref = self.on_disk(ref)
        return self._key(kind, ref, content_id(kind, ref), self._processor_options)

    def features_of(self, kind: str, ref: Reference) -> dict[str, Tensor]:
        """Like `features`, for one image or video."""
        make = self._image_features if kind == "image" else self._video_features
        return make(self.on_disk(ref)).tensors

    def _image(self, ref: Reference) -> Tensor:
        def make() -> Entry:
            with reading("image", ref), Image.open(openable(ref)) as image:
                pixels = np.asarray(process_image(image, self._image_size(ref, image)))
            return Entry({"pixels": torch.from_numpy(pixels.copy())}, {})

        key = self._key("image", ref, content_id("image", ref))
        return self.cache.get_or_make(key, make).tensors["pixels"]

    def _video(self, ref: Reference) -> Entry:
        content = content_id("video", ref)
        key = self._key("video", ref, content)

        def make() -> Entry:
            with reading("video", ref, content):
                video = read_video(payload(ref), with_item_options(self._videos, ref))
            return Entry({"frames": torch.from_numpy(video.frames)}, video.meta)

        return self.cache.get_or_make(key, lambda: self._keep(key, make))

    def _keep(self, key: str, make: Callable[[], Entry]) -> Entry:
        return make() if self._folder is None else self._folder.get_or_make(key, make)

    def _image_features(self, ref: Reference) -> Entry:
        def make() -> Entry:
            image = Image.fromarray(self._image(ref).numpy())
            made = self.processor.image_processor(images=[image], return_tensors="pt")
            return Entry({name: made[name] for name in ("pixel_values", "image_grid_thw")}, {})

        return self.cache.get_or_make(self.feature_key("image", ref), make)

    def _video_features(self, ref: Reference) -> Entry:
        def make() -> Entry:
            video = self._video(ref)
            meta = {name: value for name, value in video.meta.items() if name != "do_sample_frames"}
            made = self.processor.video_processor(
                videos=[video.tensors["frames"].numpy()],
                video_metadata=[meta | {"frames_indices": list(meta["frames_indices"])}],
                do_sample_frames=False,
                return_tensors="pt",
            )
            tensors = {name: made[name] for name in ("pixel_values_videos", "video_grid_thw")}
            if "second_per_grid_ts" in self.processor.model_input_names:
                seconds = self.processor.video_processor.temporal_patch_size / sampled_fps(meta)
                tensors["second_per_grid_ts"] = torch.tensor([seconds], dtype=torch.float32)
            return Entry(tensors, {})

        return self.cache.get_or_make(self.feature_key("video", ref), make)

    def _key(self, kind: str, ref: Reference, content: bytes, more: str = "") -> str:
        options: list[Any] = [FORMAT[kind.removesuffix(" info")]]
        if kind == "image":
            options.append(astuple(with_item_options(self._images, ref)))
        elif kind == "video":
            options += [astuple(with_item_options(self._videos, ref)), os.environ.get(BUDGET_VARIABLE)]
        digest = hashlib.blake2b(f"{kind} {json.dumps(options)} {more} ".encode(), digest_size=20)
        digest.update(content)
        return digest.hexdigest()


def _grids(grids: list[list[int]]) -> Tensor:
    return torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
