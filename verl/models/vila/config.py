# SPDX-License-Identifier: Apache-2.0
"""The config of VILA models, which the hub keeps in a folder for each part of the model.

```
config.json       `llm_cfg`, `vision_tower_cfg`, `mm_projector_cfg`, how images are cut, how media are wrapped
llm/              config, weights and tokenizer of the language model
vision_tower/     config, weights and image processor of the SigLIP tower
mm_projector/     config and weights of the projector
```
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

LLM, TOWER, PROJECTOR = PARTS = ("llm", "vision_tower", "mm_projector")  # folders, and modules of the model
SECTIONS = {"llm_cfg": "text_config", "vision_tower_cfg": "vision_config"}
TOKENS = {"image_token_id": "<image>", "video_token_id": "<vila/video>"}
CUTS = ("resize", "pad", "dynamic", "dynamic_s2")  # kinds of `image_aspect_ratio`
# Widths of the layers between input and output, in hidden sizes of the tower: a layer of norms and one of
# weights for each. The input is a square of patches.
DOWNSAMPLING: dict[str, tuple[int, tuple[float, ...]]] = {
    "mlp_downsample": (2, ()),
    "mlp_downsample_2x2_fix": (2, ()),
    "mlp_downsample_3x3_fix": (3, (3,)),
    "mlp_downsample_3x3_s2": (3, (3, 1, 1 / 3)),
    "mlp_downsample_3x3_s2_new": (3, (4, 2, 1, 1 / 3)),
}


@strict
class VilaConfig(PreTrainedConfig):
    """A vision tower, a projector and a language model.

    Raises:
        ValueError: The tokenizer has no tokens for media, or a part is of a kind that this port lacks.
    """

    model_type = "vila"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig, "vision_config": AutoConfig}
    has_no_defaults_at_init = True

    text_config: Any = None  # a config, or a dictionary of its options
    vision_config: Any = None
    projector_type: str = "mlp_downsample"
    image_aspect_ratio: str | None = "resize"
    min_tiles: int | None = 1
    max_tiles: int | None = 12
    s2: bool | None = False
    dynamic_s2: bool | None = False
    s2_scales: str | list | None = None  # edges in pixels: "448,896,1344"
    s2_resize_output_to_scale_idx: int | None = 0
    mm_vision_select_layer: int | None = -2
    mm_vision_select_feature: str | None = "cls_patch"
    image_encoder: str | dict | None = None  # texts around the features
    video_encoder: str | dict | None = None
    image_token_id: Any = None  # an integer, in the model's files or those of its tokenizer
    video_token_id: Any = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for section, name in SECTIONS.items():
            given = kwargs.pop(section, None)
            if getattr(self, name) is None:
                setattr(self, name, given)
        projector = kwargs.pop("mm_projector_cfg", None)
        if isinstance(projector, Mapping):
            self.projector_type = projector["mm_projector_type"]
        self.text_config = _part_config(self.text_config, "qwen2", "llm_cfg")
        self.vision_config = _part_config(self.vision_config, "siglip_vision_model", "vision_tower_cfg")
        self.tie_word_embeddings = self.text_config.tie_word_embeddings
        if self.s2:
            raise ValueError("`s2` must be false: images of several fixed scales are not supported")
        if self.image_aspect_ratio not in (None, *CUTS):
            raise ValueError(f"`image_aspect_ratio` must be one of {CUTS}, got {self.image_aspect_ratio!r}")
        if self.dynamic_s2 != (self.image_aspect_ratio == "dynamic_s2"):
            raise ValueError("`dynamic_s2` must be true exactly where `image_aspect_ratio` is dynamic_s2")
        super().__post_init__(**kwargs)

    @property
    def scales(self) -> list[int]:
        """The edges of an image in pixels at each scale, smallest first; one without `dynamic_s2`."""
        if not self.dynamic_s2:
            return [self.vision_config.image_size]
        given = self.s2_scales.split(",") if isinstance(self.s2_scales, str) else self.s2_scales or []
        return sorted(int(scale) for scale in given)

    @property
    def downsampling(self) -> int:
        """The edge in patches of the square that becomes one feature."""
        return DOWNSAMPLING.get(self.projector_type, (1, ()))[0]

    @property
    def tile_side(self) -> int:
        """The edge in features of a tile, and of a frame."""
        patches = self.vision_config.image_size // self.vision_config.patch_size
        return -(-patches // self.downsampling)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a config, and the tokens of media, which on the hub only the tokenizer names."""
        name = kwargs.get("name_or_path") or config_dict.get("_name_or_path")
        if name and config_dict.get("image_token_id") is None:
            config_dict = config_dict | _media_tokens(name, kwargs)
        return super().from_dict(config_dict, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write the config as the hub has it, and those of the parts into their folders."""
        folder = Path(save_directory)
        parts = {
            LLM: self.text_config.to_diff_dict(),
            TOWER: self.vision_config.to_diff_dict(),
            PROJECTOR: {"model_type": "v2l_projector", "mm_projector_type": self.projector_type},
        }
        whole = {key: value for key, value in self.to_dict().items() if key not in SECTIONS.values()}
        whole |= {f"{part}_cfg": config for part, config in parts.items()}
        whole["architectures"] = ["VILAForCausalLM"]
        for path, content in {"": whole, **parts}.items():
            (folder / path).mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=2, default=str)
            (folder / path / "config.json").write_text(text + "\n", encoding="utf-8")


def _part_config(given: Any, model_type: str, section: str) -> Any:
    if isinstance(given, PreTrainedConfig):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"`{section}` must be the config of a part of the model, got {given!r}")
    options = {"model_type": model_type, **given}
    return AutoConfig.for_model(**options)


def _media_tokens(name: Any, given: Mapping[str, Any]) -> dict[str, int]:
    options = {key: given[key] for key in ("cache_dir", "token", "revision") if key in given}
    found = AutoTokenizer.from_pretrained(name, subfolder=LLM, **options).get_added_vocab()
    missing = sorted(set(TOKENS.values()) - found.keys())
    if missing:
        raise ValueError(
            f"the tokenizer in {name}/{LLM} has no tokens {missing}: convert the checkpoint with VILA's own"
            " `convert_vila_dev_ckpt_to_remote`, or use one that its authors converted"
        )
    return {option: found[token] for option, token in TOKENS.items()}
