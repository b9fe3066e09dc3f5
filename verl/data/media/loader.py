# SPDX-License-Identifier: Apache-2.0
"""Images and videos of a prompt: sizes from file headers, pixels, model inputs, tokens.

Rows carry references (paths, URLs or bytes). `MediaLoader` turns them into what the rollout engine takes
(`decode`) and what the model takes (`features`); both are cached, so that every process of a node and every
pass over a batch shares one decoding. The number of tokens follows from sizes alone, by the arithmetic and
the constants of the model's own processor.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl.data.media.cache import Entry, MediaCache
from verl.data.media.media_folder import MediaFolder
from verl.data.media.media_options import MediaOptions
from verl.data.media.media_urls import UrlFolder, is_url
from verl.data.media.references import (
    Reference,
    content_id,
    openable,
    payload,
    reading,
    reading_unchanged,
)
from verl.data.media.sizes import image_grid, process_image, resized_size, video_grid
from verl.data.media.video import (
    VideoInfo,
    choose_frames,
    frame_size,
    probe_video,
    read_video,
    video_meta,
)

MediaData = Mapping[str, Sequence[Reference]] | None
BUDGET_VARIABLE = "MODEL_SEQ_LEN"  # read by qwen-vl-utils, whose limits frame sizes follow
FORMAT = "1"  # change it when the content of cached entries changes


@dataclass(frozen=True)
class DecodedMedia:
    """Pixels of one prompt's media.

    Attributes:
        images: RGB, in the order of their markers.
        videos: Frames (T, H, W, 3) uint8 with their metadata, in the order of their markers.
    """

    images: list[Image.Image] = field(default_factory=list)
    videos: list[tuple[np.ndarray, dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class MediaShape:
    """What decides a prompt's media tokens and positions.

    Attributes:
        image_grid_thw: (images, 3) int64 patches in time, height, width.
        video_grid_thw: (videos, 3) int64.
        second_per_grid_ts: (videos,) float32 seconds of a temporal patch.
        timestamps: For each video the time of each temporal patch, in seconds.
    """

    image_grid_thw: Tensor
    video_grid_thw: Tensor
    second_per_grid_ts: Tensor
    timestamps: list[list[float]]


class MediaLoader:
    """Reads the media of prompts for one model.

    Args:
        processor: The model's processor: image processor, video processor and media tokens.
        options: How media are read.
        cache: Keeps what was decoded; None opens the one of `options.run_id`.

    Raises:
        NotImplementedError: The processor does not count tokens by merged patches, as Qwen's do.
        ValueError: The processor would enlarge frames beyond `tokens_per_frame`.
    """

    def __init__(self, processor: Any, options: MediaOptions, cache: MediaCache | None = None) -> None:
        missing = [name for name in ("image_processor", "video_processor") if not hasattr(processor, name)]
        if missing or not hasattr(processor.image_processor, "merge_size"):
            raise NotImplementedError(
                f"{type(processor).__name__} is not supported: only the processors of Qwen2-VL, Qwen2.5-VL"
                " and Qwen3-VL are"
            )
        self.processor = processor
        self.min_pixels, self.max_pixels = options.min_pixels, options.max_pixels
        self.cache = cache or MediaCache(options.run_id)
        self._folder = MediaFolder(options.cache_dir) if options.cache_dir is not None else None
        self._urls = None if options.urls is None else UrlFolder(options.urls, self.cache.run_id)
        video = processor.video_processor
        self._videos = options.of_videos(video.patch_size * video.merge_size)
        options.check_budget(video)
        self._options = {
            "image": json.dumps([FORMAT, self.min_pixels, self.max_pixels]),
            "video": json.dumps([FORMAT, astuple(self._videos), os.environ.get(BUDGET_VARIABLE)]),
            "video info": FORMAT,
        }
        settings = processor.image_processor.to_json_string() + processor.video_processor.to_json_string()
        self._processor_options = hashlib.sha256((type(processor).__name__ + settings).encode()).hexdigest()

    # --- files

    def on_disk(self, ref: Reference) -> Reference:
        """A reference to what is on this machine: a URL is fetched, unless its file is there.

        Raises:
            ValueError: It cannot be fetched; the message names it.
            RuntimeError: There is no room for it.
        """
        source = payload(ref)
        if not is_url(source):
            return ref
        if self._urls is None:
            raise ValueError(f"{source} was not fetched: set `data.allow_media_urls=true`")
        return {"path": self._urls.path(source), "url": source}

    def _of(self, media: MediaData, kind: str) -> list[Reference]:
        return [self.on_disk(ref) for ref in (media or {}).get(kind) or []]

    # --- sizes, without pixels

    def measure(self, media: MediaData) -> MediaShape:
        """Shapes of a row's media from file headers and containers; decodes nothing.

        Raises:
            ValueError: A file is missing or is no image or video; the message names it.
        """
        images = [self._header_size(ref) for ref in self._of(media, "images")]
        videos = [self._header_video(ref) for ref in self._of(media, "videos")]
        return self._shape(images, videos)

    def shape_of(self, decoded: DecodedMedia) -> MediaShape:
        """Shapes of media that are decoded already."""
        images = [(image.height, image.width) for image in decoded.images]
        videos = [(*frames.shape[:3], meta) for frames, meta in decoded.videos]
        return self._shape(images, videos)

    def _header_size(self, ref: Reference) -> tuple[int, int]:
        with reading("image", ref), Image.open(openable(ref)) as image:
            width, height = resized_size(image.width, image.height, self.min_pixels, self.max_pixels)
            return height, width

    def _header_video(self, ref: Reference) -> tuple[int, int, int, dict[str, Any]]:
        info = self._video_info(ref)
        with reading("video", ref):
            indices = choose_frames(info, self._videos)
            size = frame_size(len(indices), info.height, info.width, self._videos)
            return len(indices), *size, video_meta(info, indices)

    def _video_info(self, ref: Reference) -> VideoInfo:
        content = content_id("video", ref)

        def make() -> Entry:
            with reading_unchanged("video", ref, content):
                return Entry({}, {"info": list(probe_video(payload(ref)))})

        return VideoInfo(*self._keep(self._key("video info", content), make).meta["info"])

    def _shape(
        self, images: list[tuple[int, int]], videos: list[tuple[int, int, int, dict[str, Any]]]
    ) -> MediaShape:
        patches = self.processor.video_processor.temporal_patch_size
        metas = [meta for *_, meta in videos]
        return MediaShape(
            image_grid_thw=_grids([image_grid(self.processor.image_processor, *size) for size in images]),
            video_grid_thw=_grids([video_grid(self.processor.video_processor, *size) for *size, _ in videos]),
            second_per_grid_ts=torch.tensor(
                [patches / sampled_fps(meta) for meta in metas], dtype=torch.float32
            ),
            timestamps=[timestamps(meta, patches) for meta in metas],
        )

    # --- pixels

    def decode(self, media: MediaData) -> DecodedMedia:
        """The pixels of a row's media; decoded once for each node while the cache keeps them.

        Raises:
            ValueError: A file is missing or corrupt; the message names it.
        """
        return DecodedMedia(
            [Image.fromarray(self._image(ref).numpy()) for ref in self._of(media, "images")],
            [
                (entry.tensors["frames"].numpy(), entry.meta)
                for entry in map(self._video, self._of(media, "videos"))
            ],
        )

    def features(self, media: MediaData) -> dict[str, Tensor]:
        """The model's inputs for a row's media, as its processor makes them.

        Returns:
            `pixel_values`, `image_grid_thw` if there are images; `pixel_values_videos`, `video_grid_thw`, and
            for models that take it `second_per_grid_ts`, if there are videos. Empty for a row without media.
        """
        entries = [self._image_features(ref) for ref in self._of(media, "images")]
        entries += [self._video_features(ref) for ref in self._of(media, "videos")]
        names = dict.fromkeys(name for entry in entries for name in entry.tensors)
        parts = {name: [entry.tensors[name] for entry in entries if name in entry.tensors] for name in names}
        return {
            name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()
        }

    def feature_key(self, kind: str, ref: Reference) -> str:
        """Names the model's inputs for an image or a video: its content and all that shapes them.

        Args:
            kind: "image" or "video".
            ref: The medium.
        """
        return self._key(kind, content_id(kind, self.on_disk(ref)), self._processor_options)

    def features_of(self, kind: str, ref: Reference) -> dict[str, Tensor]:
        """The model's inputs for one image or video, as `features` gives those of a row."""
        make = self._image_features if kind == "image" else self._video_features
        return make(self.on_disk(ref)).tensors

    def _image(self, ref: Reference) -> Tensor:
        def make() -> Entry:
            with reading("image", ref), Image.open(openable(ref)) as image:
                pixels = np.asarray(process_image(image, self.min_pixels, self.max_pixels))
            return Entry({"pixels": torch.from_numpy(pixels.copy())}, {})

        key = self._key("image", content_id("image", ref))
        return self.cache.get_or_make(key, make).tensors["pixels"]

    def _video(self, ref: Reference) -> Entry:
        content = content_id("video", ref)
        key = self._key("video", content)

        def make() -> Entry:
            with reading_unchanged("video", ref, content):
                video = read_video(payload(ref), self._videos)
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

    def _key(self, kind: str, content: bytes, more: str = "") -> str:
        digest = hashlib.blake2b(f"{kind} {self._options[kind]} {more} ".encode(), digest_size=20)
        digest.update(content)
        return digest.hexdigest()


# --- tokens


def expand_prompt(prompt_ids: list[int], processor: Any, shape: MediaShape) -> list[int]:
    """Replace each image and video token by as many tokens as the model has embeddings for it.

    Args:
        prompt_ids: With one token for each image and video.
        processor: Names the tokens.
        shape: Of the prompt's media.

    Raises:
        ValueError: The numbers of tokens and media differ.
    """
    images, videos = image_tokens(processor, shape), video_tokens(processor, shape)
    for kind, token, media in (
        ("image", processor.image_token_id, images),
        ("video", processor.video_token_id, videos),
    ):
        if prompt_ids.count(token) != len(media):
            found = prompt_ids.count(token)
            raise ValueError(f"the rendered prompt has {found} {kind} tokens for {len(media)} {kind}s")

    expanded: list[int] = []
    next_image, next_video = iter(images), iter(videos)
    for token in prompt_ids:
        if token == processor.image_token_id:
            expanded += next(next_image)
        elif token == processor.video_token_id:
            expanded += next(next_video)
        else:
            expanded.append(token)
    return expanded if _keeps_video_edges(processor) else _without_outer_edges(expanded, processor)


def image_tokens(processor: Any, shape: MediaShape) -> list[list[int]]:
    """For each image its tokens."""
    merged = processor.image_processor.merge_size**2
    return [
        [processor.image_token_id] * (math.prod(grid) // merged) for grid in shape.image_grid_thw.tolist()
    ]


def video_tokens(processor: Any, shape: MediaShape) -> list[list[int]]:
    """For each video its tokens; Qwen3-VL writes the time before the tokens of each temporal patch."""
    merged = processor.video_processor.merge_size**2
    videos = []
    for (time, height, width), stamps in zip(shape.video_grid_thw.tolist(), shape.timestamps, strict=True):
        frame = [processor.video_token_id] * (height * width // merged)
        if not has_timestamps(processor):
            videos.append(frame * time)
            continue
        tokens: list[int] = []
        for stamp in stamps:
            tokens += processor.tokenizer.encode(f"<{stamp:.1f} seconds>", add_special_tokens=False)
            tokens += [processor.vision_start_token_id, *frame, processor.vision_end_token_id]
        videos.append(tokens)
    return videos


def has_timestamps(processor: Any) -> bool:
    """Whether the model reads the time of video frames as text, as Qwen3-VL does."""
    return hasattr(processor, "_calculate_timestamps")


def _keeps_video_edges(processor: Any) -> bool:
    """Whether the template's own vision start and end stay around a video with timestamps.

    Processors of transformers before 5.10 replace them together with the video token.
    """
    return not has_timestamps(processor) or hasattr(type(processor), "replace_video_token")


def _without_outer_edges(tokens: list[int], processor: Any) -> list[int]:
    """Drop a vision start that is not followed by a media token, and its vision end."""
    start, end = processor.vision_start_token_id, processor.vision_end_token_id
    media = (processor.image_token_id, processor.video_token_id)
    kept: list[int] = []
    for position, token in enumerate(tokens):
        outer_start = token == start and tokens[position + 1] not in media
        outer_end = token == end and tokens[position - 1] == end
        if not outer_start and not outer_end:
            kept.append(token)
    return kept


def sampled_fps(meta: dict[str, Any]) -> float:
    """Frames taken from a second of the video."""
    return len(meta["frames_indices"]) / meta["total_num_frames"] * meta["fps"]


def timestamps(meta: dict[str, Any], temporal_patch_size: int) -> list[float]:
    """The time of each temporal patch, in seconds: the middle between its first and last frame."""
    indices = meta["frames_indices"]
    times = [index / meta["fps"] for index in indices + indices[-1:] * (-len(indices) % temporal_patch_size)]
    last = temporal_patch_size - 1
    return [(times[i] + times[i + last]) / 2 for i in range(0, len(times), temporal_patch_size)]


def _grids(grids: list[list[int]]) -> Tensor:
    return torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
