# SPDX-License-Identifier: Apache-2.0
"""VILA (https://arxiv.org/abs/2412.04468): a SigLIP tower, a projector and a language model.

An own port on transformers' parts. Names of tensors are those of the hub, after the folder of their part:
`llm.model.layers.0…`, `vision_tower.vision_model…`, `mm_projector.layers.1…`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from verl.models.vila.config import DOWNSAMPLING, LLM, PARTS, VilaConfig
from verl.models.vila.processor import Grid, Wrapping

PLAIN = re.compile(r"mlp(\d+)x_gelu")


class Downsample(nn.Module):
    """Joins squares of `factor` x `factor` patches, row by row; a short side is padded with zeros."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, features: Tensor) -> Tensor:
        """(N, side^2, H) to (N, ceil(side / factor)^2, H x factor^2)."""
        side, factor = round(features.shape[1] ** 0.5), self.factor
        square, missing = features.unflatten(1, (side, side)), -side % factor
        square = pad(square, (0, 0, 0, missing, 0, missing))
        blocks = square.unflatten(2, (-1, factor)).unflatten(1, (-1, factor)).transpose(2, 3)
        return blocks.flatten(3).flatten(1, 2)


class Projector(nn.Module):
    """Turns features of patches into those of tokens; layers are numbered as on the hub."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        width = config.vision_config.hidden_size * len(config.scales)
        layers = _projector_layers(config.projector_type, width, config.text_config.hidden_size)
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """(N, patches, width) to (N, tokens, hidden size)."""
        return self.layers(features)


def _projector_layers(kind: str, width: int, hidden: int) -> Iterator[nn.Module]:
    if kind in DOWNSAMPLING:
        factor, widths = DOWNSAMPLING[kind]
        yield Downsample(factor)
        sizes = [width * factor**2, *(int(width * each) for each in widths)]
        for size, following in zip(sizes, [*sizes[1:], hidden], strict=True):
            yield from (nn.LayerNorm(size), nn.Linear(size, following), nn.GELU())
        yield nn.Linear(hidden, hidden)
        return
    depth = 1 if kind == "linear" else int(found[1]) if (found := PLAIN.fullmatch(kind)) else None
    if depth is None:
        known = [*DOWNSAMPLING, "linear", "mlp2x_gelu"]
        raise ValueError(f"`mm_projector_type` must be one of {known}, got {kind!r}")
    yield nn.Linear(width, hidden)
    for _ in range(depth - 1):
        yield from (nn.GELU(), nn.Linear(hidden, hidden))


class VilaForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """A causal language model that reads images and videos."""

    config_class = VilaConfig
    main_input_name = "input_ids"
    input_modalities: ClassVar[Any] = ("image", "video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["SiglipEncoderLayer"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _skip_keys_device_placement: ClassVar = ["past_key_values"]

    def __init__(self, config: VilaConfig) -> None:
        super().__init__(config)
        self.llm = AutoModelForCausalLM.from_config(config.text_config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.mm_projector = Projector(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        """Load the parts from their folders, or a `state_dict` without a folder."""
        if name is not None and state_dict is None:
            folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name))
            if (folder / LLM).is_dir():
                kwargs.setdefault("config", VilaConfig.from_pretrained(folder))
                name, state_dict = None, dict(_stored_tensors(folder))
        return super().from_pretrained(name, *args, state_dict=state_dict, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.llm.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.llm.get_output_embeddings()

    def get_decoder(self) -> nn.Module:
        return self.llm.get_decoder()

    def patch_features(self, pixels: Tensor) -> Tensor:
        """Encode tiles and frames (N, 3, edge, edge): (N, patches, H) of the layer that the config names."""
        tower, layer = self.vision_tower, self.config.mm_vision_select_layer
        count = layer if layer >= 0 else len(tower.encoder.layers) + 1 + layer
        hidden = tower.embeddings(pixels.to(tower.dtype))
        for block in tower.encoder.layers[:count]:
            hidden = block(hidden, None)
        return hidden[:, 1:] if self.config.mm_vision_select_feature == "patch" else hidden

    def image_features(self, patches: Tensor, shape: Sequence[Grid]) -> Tensor:
        """Project the patches of an image's tiles (N, patches, H): (tokens, hidden size)."""
        if not self.config.dynamic_s2:
            return self.mm_projector(patches).flatten(0, 1)
        counts = [rows * columns for rows, columns in shape]
        copies = [chessboard(part, grid) for part, grid in zip(patches.split(counts), shape, strict=True)]
        chosen = self.config.s2_resize_output_to_scale_idx
        size, (rows, columns) = copies[chosen].shape[:2], shape[chosen]
        joined = torch.cat([_resized(copy, size) for copy in copies], -1)
        side = size[0] // rows
        tiles = joined.unflatten(1, (columns, side)).unflatten(0, (rows, side)).transpose(1, 2)
        return chessboard(self.mm_projector(tiles.flatten(2, 3).flatten(0, 1)), shape[chosen]).flatten(0, 1)

    def video_features(self, patches: Tensor) -> Tensor:
        """Project the patches of frames (N, patches, H): (tokens, hidden size)."""
        features = self.mm_projector(torch.cat([patches] * len(self.config.scales), -1))
        wrapping = Wrapping.of(self.config.video_encoder)
        return torch.cat([pooled(features, pool) for pool in wrapping.pools])

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,  # (tiles, 3, edge, edge): those of all images
        image_grids: Sequence[Sequence[Grid]] = (),  # of each image, from `verl.models.vila.processor.grids`
        pixel_values_videos: Tensor | None = None,  # (frames, 3, edge, edge): those of all videos
        video_frames: Sequence[int] = (),  # of each video
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits; features replace the embeddings of the tokens of media, in their order."""
        embeddings: Any = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        features: dict[int, list[Tensor]] = {}
        if pixel_values is not None:
            counts = [sum(rows * columns for rows, columns in shape) for shape in image_grids]
            parts = zip(self.patch_features(pixel_values).split(counts), image_grids, strict=True)
            features[self.config.image_token_id] = [self.image_features(*part) for part in parts]
        if pixel_values_videos is not None:
            videos = self.patch_features(pixel_values_videos).split(list(video_frames))
            features[self.config.video_token_id] = [self.video_features(part) for part in videos]
        for token, found in features.items():
            place = (input_ids == token)[..., None]
            embeddings = embeddings.masked_scatter(place, torch.cat(found).to(embeddings.dtype))
        outputs = self.get_decoder()(inputs_embeds=embeddings, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(outputs.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


def chessboard(tiles: Tensor, grid: Grid) -> Tensor:
    """Join the features of a grid's tiles (rows x columns, side^2, H): (height, width, H)."""
    side = round(tiles.shape[1] ** 0.5)
    squares = tiles.unflatten(1, (side, side)).unflatten(0, grid)
    return squares.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def pooled(features: Tensor, sizes: Sequence[int]) -> Tensor:
    """Average the features of frames (T, side^2, H) over boxes of time, height and width: (tokens, H)."""
    side = round(features.shape[1] ** 0.5)
    boxes = features.unflatten(1, (side, side))
    for dim, size in enumerate(sizes):
        boxes = boxes.unflatten(dim, (-1, size)).mean(dim + 1)
    return boxes.flatten(0, 2)


def _resized(features: Tensor, size: torch.Size) -> Tensor:
    moved = features.permute(2, 0, 1)[None].float()
    return interpolate(moved, size=size, mode="area")[0].permute(1, 2, 0).to(features.dtype)


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for part in PARTS:
        files = sorted((folder / part).glob("*.safetensors"))
        if not files:
            raise OSError(f"{folder / part} has no safetensors files")
        for file in files:
            for name, tensor in load_file(file).items():
                yield f"{part}.{name}", tensor
