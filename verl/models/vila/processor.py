# SPDX-License-Identifier: Apache-2.0
"""The processor of VILA models: their tokenizer, the settings of their images, and their chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from verl.models.vila.config import LLM, TOKENS, TOWER, VilaConfig
from verl.models.vila.tiles import ONE, Grid, ImageSettings, Wrapping, grids, image_units, passes

SETTINGS = "preprocessor_config.json"
NEWLINE = "\n"  # after each tile of a `dynamic` image, in the text of the prompt
CUTTING = ("image_aspect_ratio", "min_tiles", "max_tiles", "s2_scales")  # options of the model's config
# Before the tokenizer's own template, which reads texts: media become their tokens, as in VILA.
MEDIA = str({name.partition("_")[0]: token for name, token in TOKENS.items()})
FLATTEN = Path(__file__).with_name("flatten.jinja").read_text(encoding="utf-8").replace("MEDIA", MEDIA)


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
