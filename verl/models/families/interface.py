# SPDX-License-Identifier: Apache-2.0
"""Model families: all that training has to know of a type of model beyond its transformers class.

`Family` describes text models, `MediaFamily` models that read media of any kind, among which a `VisionFamily`
reads images. Each family has a file, which `registry.py` lists; `GenericFamily` reads a model that has none
through its own processor and `get_image_features`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
Sense = Literal["vision", "audio"]  # of an encoder; `freeze_vision_tower` and `freeze_audio_tower` name them
DEFAULT_PATCHES = 4  # of a token
# Of configs, for the tokens whose embeddings are replaced by features.
TOKEN_OPTIONS: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index", "media_placeholder_token_id"),
    "video": ("video_token_id",),
    "audio": ("audio_token_id",),
}
# Names of a language model's tensors in a model that reads media, as checkpoints have them.
LANGUAGE_MODEL = re.compile(
    r"(?:(?:model\.)?(?:language_model|llm)\.)?"
    r"(?:(?P<head>lm_head\..*)|(?:model\.)?(?P<rest>(?:embed_tokens|layers|norm)\..*))"
)
WHAT_TO_WRITE = (
    "describe what is different in a file, like those of verl/models/families, and give it as"
    " `worker.actor.model.family=my_family.py:family` (docs/extensions.md)"
)
# A small and a large image of each shape; the area of some shapes alone decides the number of tiles.
COMPARED_SIZES = ((64, 96), (1024, 1536)), ((64, 64), (1024, 1024)), ((64, 128), (1024, 2048))
# Options of processors that decide the size of images and frames, and so the number of their tokens.
SIZE_OPTIONS = (
    "max_soft_tokens", "max_patches", "max_image_tiles", "max_slice_nums", "image_seq_length",
    "image_grid_pinpoints", "size",
)  # fmt: skip


class Medium(NamedTuple):
    """An image, a video or an audio clip as a model's encoder reads it."""

    kind: Kind
    tensors: dict[str, Tensor]  # by the processor's names; they go to the device
    facts: Mapping[str, Any]  # those of its `MediumShape`: numbers on the host


@dataclass(frozen=True)
class MediumShape:
    """Properties of a medium that are known without its pixels or samples."""

    tokens: list[int]  # that replace its placeholder in the prompt
    facts: dict[str, Any]  # plain numbers for features, positions and the engine: {"grid_thw": [1, 4, 6]}


@dataclass(frozen=True)
class MediaShape:
    """Shapes of a prompt's media, in the order of their placeholders."""

    images: list[MediumShape] = field(default_factory=list)
    videos: list[MediumShape] = field(default_factory=list)
    audios: list[MediumShape] = field(default_factory=list)

    def of(self, kind: Kind) -> list[MediumShape]:
        return getattr(self, f"{kind}s")


class EncodedMedium(NamedTuple):
    """The features of a medium, and its facts."""

    features: Tensor  # (tokens, hidden size x (1 + deepstack levels))
    facts: Mapping[str, Any]


class ExampleRow(NamedTuple):
    """Tokens that contain a small medium of each encoder, and these media."""

    input_ids: Tensor  # (L,) int64
    media: list[Medium]


class Family:
    """A family of language models."""

    kinds: ClassVar[tuple[Kind, ...]] = ()  # of media that the models read
    model_types: ClassVar[tuple[str, ...]] = ()  # of the models' configs, in users' files
    tiny: ClassVar[Mapping[str, Any]] = {}  # a `TinyModel` by each name that `verl-tiny-model --kind` takes
    position_rows: ClassVar[int] = 1  # 4 for M-RoPE: text, time, height, width
    # Joint experts of shape (experts, in, out) on the hub that transformers holds and writes transposed.
    transposed_experts: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # by model type: ends of names

    # Starts of the names of tensors on the hub that transformers does not load; merged models keep them.
    unread: ClassVar[tuple[str, ...]] = ()
    unread_files: ClassVar[tuple[str, ...]] = ()  # of their checkpoints, which merged models keep as well

    # Where the hub has these models as parts of larger ones: the names of their configs in those of the whole
    # models, by the types of these; and the start of their tensors' names.
    wholes: ClassVar[Mapping[str, str]] = {}
    hub_prefix: ClassVar[str] = ""

    # Where the hub has a model in several folders: these, which are also the first parts of tensors' names.
    folders: ClassVar[tuple[str, ...]] = ()

    # Functions of `verl.workers.rollout.vllm.family_patches` that vLLM needs for these models.
    engine_patches: ClassVar[tuple[str, ...]] = ()
    # Its schemas of features, `module:class`, that must take images of different lengths.
    engine_schemas: ClassVar[tuple[str, ...]] = ()
    engine_modules: ClassVar[tuple[str, ...]] = ()  # vLLM's names of those in `encoder`, if they differ
    # vLLM runs the language model alone, which reads prompts as embeddings: those of tokens, and features.
    embeds_prompts: ClassVar[bool] = False

    @property
    def encoders(self) -> dict[Sense, tuple[str, ...]]:
        """The modules and parameters that turn pixels, or samples, into features."""
        return {}

    @property
    def encoder(self) -> tuple[str, ...]:
        """The modules and parameters that turn media into features."""
        return tuple(name for names in self.encoders.values() for name in names)

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        """Return the patches or frames in the layers of an encoder that make a token, for the memory plan."""
        return DEFAULT_PATCHES

    def block_layers(self, config: Any) -> tuple[str, ...]:
        """Return the types of layers, as in `layer_types`, where adjacent media tokens see each other.

        There each token of an image attends to the image's later tokens too.
        """
        return ()

    def positions(self, config: Any, input_ids: Tensor, shape: MediaShape) -> Tensor | None:
        """Return positions (4, L) of an expanded prompt (L,), equal to vLLM's; None counts from 0."""
        return None

    def own_arguments(self, config: Any, input_ids: Tensor) -> dict[str, Tensor]:
        """Return what the model's own padded forward takes besides (B, T) ids and mask: token types."""
        return {}

    def repair(self, model: Any) -> None:
        """Correct the own padded forward of this model, and of no other one of its class."""

    def engine_overrides(self, config: Any) -> dict[str, Any]:
        """Return options of the config, or of its language model, that vLLM reads by other names."""
        return {}

    def engine_name(self, name: str) -> str | None:
        """Return vLLM's name of a tensor that is named as on the hub; None if it has none."""
        if not self.embeds_prompts:
            return name
        found = LANGUAGE_MODEL.fullmatch(name)
        return found and (found["head"] or f"model.{found['rest']}")


class MediaFamily(Family, ABC):
    """A family of models that read media: images, videos or audio.

    Its modules come first, then tokens and positions, inputs and features, options of media, and the rollout
    engine. Shapes and inputs of kinds that the models do not read raise a ValueError.
    """

    media_owner: ClassVar[str] = "model"  # the module that the encoders belong to

    # transformers' name of the encoders' attention; with lengths of packed patches `VISION_ATTENTION`
    tower_attention: ClassVar[str] = "sdpa"

    @property
    @abstractmethod
    def encoders(self) -> dict[Sense, tuple[str, ...]]: ...

    def token_of(self, processor: Any, kind: Kind) -> int:
        """Return the token that stands for a medium in a rendered prompt."""
        return getattr(processor, f"{kind}_token_id")

    def placeholders(self, processor: Any) -> dict[int, Kind]:
        """Return the kinds of media by the token that stands for one in a rendered prompt."""
        return {self.token_of(processor, kind): kind for kind in self.kinds}

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        """Return the shape of an image of this size in pixels."""
        raise ValueError(f"{type(self).__name__} reads no images")

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        """Return the shape of a video of sampled frames.

        Args:
            meta: That of `verl.data.media.video`; with sound also `num_samples`, at the processor's rate.
        """
        raise ValueError(f"{type(self).__name__} reads no videos")

    def audio_shape(self, processor: Any, num_samples: int) -> MediumShape:
        """Return the shape of an audio clip, given its number of samples at the processor's rate."""
        raise ValueError(f"{type(self).__name__} reads no audio")

    def expand(self, processor: Any, prompt_ids: list[int], shape: MediaShape) -> list[int]:
        """Replace the placeholder of each medium by its tokens.

        Raises:
            ValueError: There are more or fewer placeholders than media.
        """
        kinds = self.placeholders(processor)
        for kind in KINDS:
            found, given = sum(kinds.get(token) == kind for token in prompt_ids), len(shape.of(kind))
            if found != given:
                raise ValueError(f"the rendered prompt has {found} {kind} tokens for {given} {kind}s")
        remaining = {kind: iter(shape.of(kind)) for kind in KINDS}
        expanded: list[int] = []
        for token in prompt_ids:
            kind = kinds.get(token)
            expanded += [token] if kind is None else next(remaining[kind]).tokens
        return expanded

    def media_tokens(self, config: Any, input_ids: Tensor) -> dict[Kind, Tensor]:
        """Return where features replace the embeddings of expanded, packed ids (N,): (n,) for each kind."""
        kinds: list[Kind] = [kind for kind in self.kinds if self.token_kind(kind) == kind]
        return {kind: (input_ids == media_token_id(config, kind)).nonzero()[:, 0] for kind in kinds}

    def token_kind(self, kind: Kind) -> Kind:
        """Return the kind under which `media_tokens` lists the tokens of media of this kind.

        If both kinds have one token, features replace it in the order of the prompt.
        """
        return kind

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        """Return the tensors of an RGB image's `Medium`."""
        raise ValueError(f"{type(self).__name__} reads no images")

    def video_inputs(self, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of the `Medium` of a video (T, H, W, 3) uint8."""
        raise ValueError(f"{type(self).__name__} reads no videos")

    def audio_inputs(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        """Return the tensors of the `Medium` of an audio clip (N,) float32 at the processor's rate."""
        raise ValueError(f"{type(self).__name__} reads no audio")

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        """Return the arguments of the model's own forward for media in the order of their tokens."""
        return join_tensors([medium.tensors for medium in media])

    @abstractmethod
    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        """Compute the features of all media in one call of the tower, so that all ranks run it equally often.

        With several encoders each runs once, and all take part in the backward pass.

        Returns:
            For each medium (tokens, hidden size); with deepstack (tokens, hidden size x (1 + levels)).
        """

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        """Return the features of each part of a medium that is encoded on its own: frames, tiles, seconds."""
        return [facts["features"]]

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        """Return the medium of units `first` to `stop`, whose features are those of the whole."""
        return medium

    @abstractmethod
    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        """Return a row of one small medium for each encoder: blank, or with a generator of random values."""

    def sized_by(self, processor: Any, kind: Kind) -> tuple[str, ...]:
        """Return the processor's options that alone decide the tokens of an image, or of a video's frames.

        None do if a larger image of some shape has other tokens: then limits of its pixels have an effect.
        Audio has no pixels.
        """
        return ()

    def frame_factor(self, processor: Any) -> int:
        """Return the edge in pixels of the part of a frame that a token stands for."""
        return 28

    def smallest_frame(self, processor: Any) -> int:
        """Return the fewest tokens of a frame that the processor never enlarges."""
        return 1

    def resized_image(self, processor: Any, height: int, width: int) -> tuple[int, int]:
        """Return height and width after the processor's own resizing."""
        return height, width

    takes_features: ClassVar[bool] = False  # vLLM reads features of images and videos instead of pixels
    takes_video_features: ClassVar[bool] = True  # with `takes_features`; else those of images only

    def engine_features(self, kind: Kind, media: Sequence[EncodedMedium]) -> Any:
        """Return vLLM's multimodal data of a prompt's images, or videos, whose features are known."""
        return [medium.features for medium in media]

    def engine_options(self, kinds: Container[Kind], videos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return vLLM's `mm_processor_kwargs` for media of these kinds; `videos` has the `meta` of each."""
        # Frames were sampled when the video was decoded.
        return {"do_sample_frames": False} if "video" in kinds else {}


class VisionFamily(MediaFamily, ABC):
    """A family of models that read images, and perhaps videos and audio."""

    kinds: ClassVar[tuple[Kind, ...]] = ("image",)
    tower: ClassVar[str] = "model.vision_tower"
    projector: ClassVar[str | None] = "model.multi_modal_projector"  # None if the tower contains it

    @property
    def encoders(self) -> dict[Sense, tuple[str, ...]]:
        return {"vision": (self.tower,) if self.projector is None else (self.tower, self.projector)}

    @abstractmethod
    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape: ...

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        made = processor.image_processor(images=[image], return_tensors="pt")
        return {"pixel_values": made["pixel_values"]}

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        return DEFAULT_PATCHES if merge is None else merge**2

    def sized_by(self, processor: Any, kind: Kind) -> tuple[str, ...]:
        if kind == "audio":
            return ()
        counts = partial(self._tokens_of_size, processor, kind)
        if any(counts(*small) != counts(*large) for small, large in COMPARED_SIZES):
            return ()
        part = getattr(processor, f"{kind}_processor", None) or processor.image_processor
        return tuple(name for name in SIZE_OPTIONS if getattr(part, name, None) is not None)

    def _tokens_of_size(self, processor: Any, kind: Kind, height: int, width: int) -> int:
        if kind == "image":
            return len(self.image_shape(processor, height, width).tokens)
        meta: dict[str, Any] = {"total_num_frames": 2, "fps": 1.0, "duration": 2.0, "frames_indices": [0, 1]}
        meta |= {"video_backend": "pyav", "do_sample_frames": False}
        return len(self.video_shape(processor, 2, height, width, meta).tokens)


def needs_family(reason: str, hint: str = "") -> NotImplementedError:
    """Return the error of a model that differs from others in a way which no file describes."""
    return NotImplementedError(f"{reason}: {WHAT_TO_WRITE}{hint}")


def is_part(name: str, parts: Sequence[str]) -> bool:
    """Return whether a tensor or module is one of `parts`, or in one of them."""
    return name in parts or name.startswith(tuple(f"{part}." for part in parts))


def media_token_id(config: Any, kind: Kind) -> int:
    """Return the token of this kind of media whose embeddings are replaced by features."""
    for name in TOKEN_OPTIONS[kind]:
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    options = ", ".join(TOKEN_OPTIONS[kind])
    raise needs_family(f"{config.model_type}: the config names no {kind} token ({options})")


def example_pixels(shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Return the pixels of `MediaFamily.example`: zeros, or with a generator random ones from 0 to 1."""
    return torch.zeros(*shape) if generator is None else torch.rand(*shape, generator=generator)


def processed_video(processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> Any:
    """Return what the processor makes of a video whose frames were sampled before."""
    known = {name: value for name, value in meta.items() if name != "do_sample_frames"}
    return processor.video_processor(
        videos=[frames],
        video_metadata=[known | {"frames_indices": list(meta["frames_indices"])}],
        do_sample_frames=False,
        return_tensors="pt",
    )


def join_tensors(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join tensors of the same name along their first dimension; not every part has every name."""
    joined: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.items():
            joined.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in joined.items()}
