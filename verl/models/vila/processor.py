# SPDX-License-Identifier: Apache-2.0
"""The processor of VILA models: tokenizer, tiles of images, texts around features, and chat template."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from verl.models.vila.config import LLM, TOKENS, TOWER, VilaConfig

Grid = tuple[int, int]  # rows and columns of tiles
ONE: Grid = (1, 1)
BASIC, POOLED = ("BasicImageEncoder", "BasicVideoEncoder"), "TSPVideoEncoder"
SETTINGS = "preprocessor_config.json"
NEWLINE = "\n"  # after each tile of a `dynamic` image, in the text of the prompt
CUTTING = ("image_aspect_ratio", "min_tiles", "max_tiles", "s2_scales")  # options of the model's config
# Before the tokenizer's own template, which reads texts: media become their tokens, as in VILA.
MEDIA = str({name.partition("_")[0]: token for name, token in TOKENS.items()})
FLATTEN = Path(__file__).with_name("flatten.jinja").read_text(encoding="utf-8").replace("MEDIA", MEDIA)


def grids(config: VilaConfig, height: int, width: int) -> list[Grid]:
    """Return the grid of each scaled copy of an image; `dynamic` has the whole image as the last one.

    With `dynamic_s2` (https://arxiv.org/abs/2412.04468, section 3.1) all copies but the last are square.
    """
    if config.image_aspect_ratio == "dynamic":
        grid = closest_grid(
            height, width, config.vision_config.image_size, config.min_tiles, config.max_tiles
        )
        return [grid] if grid == ONE else [grid, ONE]
    if config.image_aspect_ratio == "dynamic_s2":
        edges = [scale // config.scales[0] for scale in config.scales]
        last = closest_grid(height, width, config.scales[0], edges[-1] ** 2, config.max_tiles)
        return [*((edge, edge) for edge in edges[:-1]), last]
    return [ONE]


def closest_grid(height: int, width: int, tile: int, least: int | None, most: int | None) -> Grid:
    """Return the grid of `least` to `most` tiles whose shape is closest to the image's.

    Of several grids of that shape it is the largest of which the image covers more than half.
    """
    least, most = least or 1, most or 1
    found, smallest = ONE, math.inf
    sides = range(1, most + 1)
    choices = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    for columns, rows in sorted(choices, key=math.prod):
        apart = abs(width / height - columns / rows)
        is_covered = height * width > 0.5 * tile**2 * columns * rows
        if apart < smallest or (apart == smallest and is_covered):
            found, smallest = (rows, columns), apart
    return found


class ImageSettings:
    """The settings of the tower's image processor, as its file has them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.size = values, values["size"]

    def to_json_string(self) -> str:
        """Return the settings as JSON; media are cached under them."""
        return json.dumps(self.values, indent=2, sort_keys=True)

    def pixels(self, image: Image.Image, shape: list[Grid], *, pads: bool) -> Tensor:
        """Return the tiles of an RGB image, grid by grid and row by row: (tiles, 3, tile, tile) float32."""
        mean, std = self.values["image_mean"], self.values["image_std"]
        if pads:
            image = _padded(image, mean)
        tiles = [np.asarray(tile, dtype=np.float32) for grid in shape for tile in self._cut(image, grid)]
        scaled = np.stack(tiles) / np.float32(255)
        normalized = (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(normalized.transpose(0, 3, 1, 2)))

    def _cut(self, image: Image.Image, grid: Grid) -> Iterator[Image.Image]:
        tile, (rows, columns) = self.size["height"], grid
        resized = image.resize((columns * tile, rows * tile))  # bicubic
        for top in range(0, rows * tile, tile):
            for left in range(0, columns * tile, tile):
                yield resized.crop((left, top, left + tile, top + tile))


def _padded(image: Image.Image, mean: Sequence[float]) -> Image.Image:
    side = max(image.size)
    square = Image.new("RGB", (side, side), tuple(int(value * 255) for value in mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


@dataclass(frozen=True)
class Wrapping:
    """The texts around features, and the pooling of a video's: time, height and width of each pass.

    With several passes, a video's features are those of all passes, one after another.
    """

    start: str = ""  # before each image or frame
    end: str = "\n"  # after it
    between: str = ""  # after each pass
    pools: tuple[tuple[int, int, int], ...] = ((1, 1, 1),)

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | None) -> "Wrapping":
        """Read `image_encoder` or `video_encoder` of a config, perhaps as JSON."""
        options = json.loads(given) if isinstance(given, str) else dict(given or {})
        name = str(options.get("_target_", BASIC[0])).rpartition(".")[2]
        if name not in (*BASIC, POOLED):
            raise ValueError(f"an encoder of media must be {', '.join(BASIC)} or {POOLED}, got {name}")
        pools = [(time, height, width) for time, height, width in options.get("pool_sizes", ())]
        return cls(
            options.get("start_tokens") or "",
            options.get("end_tokens", "\n") or "",
            options.get("sep_tokens") or "",
            tuple(pools) or cls.pools,
        )


def image_units(config: VilaConfig, shape: Sequence[Grid]) -> list[int]:
    """Return the features of each part of an image: its tiles, or all of its scales together."""
    tile = config.tile_side**2
    if config.dynamic_s2:
        return [tile * math.prod(shape[config.s2_resize_output_to_scale_idx or 0])]
    return [tile] * sum(map(math.prod, shape))


def passes(config: VilaConfig, num_frames: int) -> list[tuple[int, int]]:
    """Return the frames of each pass over a video, and the features of one.

    Raises:
        ValueError: Their number is not a multiple of the number that is averaged.
    """
    found = []
    for time, height, width in Wrapping.of(config.video_encoder).pools:
        if num_frames % time:
            raise ValueError(
                f"the model averages {time} frames, {num_frames} of a video do not divide by that: set"
                " `worker.rollout.num_video_frames` to a multiple"
            )
        found.append((num_frames // time, config.tile_side // height * (config.tile_side // width)))
    return found


class VilaProcessor:
    """Holds what turns a row into a prompt."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any], config: VilaConfig) -> None:
        cuts = {name: value for name in CUTTING if (value := getattr(config, name)) is not None}
        tile = config.scales[0]
        self.tokenizer, self.config = tokenizer, config
        self.image_processor = ImageSettings(settings | cuts | {"size": {"height": tile, "width": tile}})
        self.image_token_id, self.video_token_id = config.image_token_id, config.video_token_id
        self.chat_template = FLATTEN + tokenizer.chat_template if tokenizer.chat_template else None

    @classmethod
    def from_pretrained(cls, name: Any, **kwargs: Any) -> "VilaProcessor":
        options = {key: kwargs[key] for key in ("cache_dir", "token", "revision") if key in kwargs}
        tokenizer = AutoTokenizer.from_pretrained(name, subfolder=LLM, **options)
        file = cached_file(name, SETTINGS, subfolder=TOWER, **options)
        assert file is not None, "a missing file is an OSError"
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        return cls(tokenizer, settings, VilaConfig.from_pretrained(name, **options))

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        folder = Path(save_directory)
        self.tokenizer.save_pretrained(folder / LLM)
        (folder / TOWER).mkdir(parents=True, exist_ok=True)
        (folder / TOWER / SETTINGS).write_text(self.image_processor.to_json_string() + "\n", encoding="utf-8")

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
        """Render a conversation whose contents are texts or lists of parts."""
        return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **kwargs)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def image_tokens(self, shape: Sequence[Grid]) -> list[int]:
        after = self.encode(NEWLINE) if self.config.image_aspect_ratio == "dynamic" and len(shape) > 1 else []
        units = image_units(self.config, shape)
        tiles = self._wrapped(self.image_token_id, units, self.config.image_encoder)
        return [token for tile in tiles for token in (*tile, *after)]

    def video_tokens(self, num_frames: int) -> list[int]:
        tokens, encoder = [], self.config.video_encoder
        for count, size in passes(self.config, num_frames):
            for frame in self._wrapped(self.video_token_id, [size] * count, encoder):
                tokens += frame
            tokens += self.encode(Wrapping.of(encoder).between)
        return tokens

    def _wrapped(self, token: int, sizes: Sequence[int], encoder: Any) -> list[list[int]]:
        # the tokens of a tile or frame, given its number of features
        wrapping = Wrapping.of(encoder)
        start, end = self.encode(wrapping.start), self.encode(wrapping.end)
        return [[*start, *[token] * size, *end] for size in sizes]

    def image_pixels(self, image: Image.Image) -> Tensor:
        """Return the tiles of an image: (tiles, 3, edge, edge)."""
        return self._pixels(image, grids(self.config, image.height, image.width))

    def frame_pixels(self, frames: np.ndarray) -> Tensor:
        """Return the frames of a video (T, H, W, 3) uint8 as tiles: (T, 3, edge, edge)."""
        return torch.cat([self._pixels(Image.fromarray(frame), [ONE]) for frame in frames])

    def _pixels(self, image: Image.Image, shape: list[Grid]) -> Tensor:
        return self.image_processor.pixels(image, shape, pads=self.config.image_aspect_ratio == "pad")


class VilaTokenizer:
    """The place of the tokenizer among the folders, for `AutoTokenizer`."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        return AutoTokenizer.from_pretrained(name, *args, subfolder=LLM, **kwargs)
