# SPDX-License-Identifier: Apache-2.0
"""Fallback for image models without a file: their own processor and `get_image_features`.

Nothing here knows a name. The modules are found in the model's structure, the tokens and tensors of an image
are what the processor makes for it alone, and the processor itself shows how those of several images
are joined. What this cannot express is refused before training: here, or by the comparison with the model's
own padded forward (`verl.models.registry.check_model`) and with the rollout engine.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from verl.models.families.interface import (
    WHAT_TO_WRITE,
    ExampleRow,
    Kind,
    MediaShape,
    Medium,
    MediumShape,
    Sense,
    VisionFamily,
    media_token_id,
    needs_family,
)

TEXT_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments of a model's own forward
BLANK = 128  # gray: models skip images whose normalized pixels are all zero
# Height and width of two images: most processors make other tensors of them, in shape or in number.
PROBES = ((64, 64), (96, 288))


class Structure(NamedTuple):
    """Names of a model's modules and arguments."""

    owner: str  # the module with `get_image_features`
    encoder: tuple[str, ...]  # modules and parameters that features are made of, the tower first
    arguments: frozenset[str]  # of the model's own forward


class GenericFamily(VisionFamily):
    """A type of model, or without a config what its processor tells.

    A file may override what is different about its models; they are still compared at the start.

    Facts of an image: `counts`, the number of each of its tokens, because only the config knows which one is
    replaced by features; and `joins`, the dimension along which each of its tensors is joined with those of
    other images, where other dimensions are padded with zeros.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def of(self, config: Any) -> "GenericFamily":
        """Return the family of one model, whose structure it looks up."""
        return type(self)(config)

    @property
    def structure(self) -> Structure:
        """The model's structure.

        Raises:
            NotImplementedError: The model cannot be trained without a family of its own.
        """
        assert self.config is not None, "modules are those of a model"
        key = self.config.model_type, self.config.get_text_config().model_type
        if key not in _structures:  # an empty model takes noticeable time to build
            _structures[key] = find_structure(_empty_model(self.config))
        return _structures[key]

    @property
    def media_owner(self) -> str:  # type: ignore[override]
        return self.structure.owner

    @property
    def encoders(self) -> dict[Sense, tuple[str, ...]]:
        return {"vision": self.structure.encoder}

    def placeholders(self, processor: Any) -> dict[int, Kind]:
        return {_placeholder(processor)[1]: "image"}

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        tokens = list(_tokens_of_size(processor, height, width))
        counts = [list(pair) for pair in Counter(tokens).items()]
        return MediumShape(tokens, {"counts": counts, "joins": dict(_joins(processor))})

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        raise ValueError(
            f"{type(processor).__name__} reads no videos without a file of its model: {WHAT_TO_WRITE}"
        )

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        return _processed(processor, [image]).tensors

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        joined = joined_tensors(media)
        known = self.structure.arguments
        return {name: value for name, value in joined.items() if name in known}

    def own_arguments(self, config: Any, input_ids: Tensor) -> dict[str, Tensor]:
        is_image = (input_ids == media_token_id(config, "image")).long()
        return {name: is_image for name in TOKEN_TYPES if name in self.structure.arguments}

    def image_features(self, owner: Any, inputs: dict[str, Tensor]) -> Any:
        """Return the features of the images in `inputs`: one tensor, or one of each image or tile."""
        encoded = owner.get_image_features(**inputs, return_dict=True)
        return getattr(encoded, "pooler_output", encoded)

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        known = inspect.signature(owner.get_image_features).parameters
        inputs = {name: value for name, value in joined_tensors(media).items() if name in known}
        encoded = self.image_features(owner, inputs)
        parts = encoded if isinstance(encoded, list | tuple) else [encoded]
        features = [part.flatten(0, -2) for part in parts if torch.is_tensor(part)]  # (tokens, hidden size)
        found, counts = sum(map(len, features)), [self.units(self.config, each.facts)[0] for each in media]
        if found != sum(counts):
            raise needs_family(
                f"{type(owner).__name__}.get_image_features returns {found} features for images with"
                f" {sum(counts)} tokens",
                ", with its `image_features`",
            )
        return list(torch.cat(features).split(counts))

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        return [dict(facts["counts"]).get(media_token_id(config, "image"), 0)]

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        """Return a row of a blank image, or with a generator one of two random images of different sizes."""
        images = [_image(size, generator) for size in (PROBES[:1] if generator is None else PROBES)]
        shapes = [self.image_shape(processor, image.height, image.width) for image in images]
        prompt = [_placeholder(processor)[1]] * len(images)
        ids = self.expand(processor, prompt, MediaShape(images=shapes))
        media = [
            Medium("image", self.image_inputs(processor, image), shape.facts)
            for image, shape in zip(images, shapes, strict=True)
        ]
        return ExampleRow(torch.tensor(ids), media)


_structures: dict[tuple[str, str], Structure] = {}  # by the types of a model and its language model


def _empty_model(config: Any) -> PreTrainedModel:
    if type(config) not in AutoModelForImageTextToText._model_mapping:
        raise needs_family(f"{config.model_type} is not an image-text model of transformers")
    try:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(copy.deepcopy(config))
    except (ImportError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise NotImplementedError(f"{config.model_type} cannot be built from its config: {reason}") from error


def find_structure(model: PreTrainedModel) -> Structure:
    """Find the modules of a model that read images.

    Raises:
        NotImplementedError: The model needs its own file.
    """
    name, text = f"{type(model).__name__} ({model.config.model_type})", model.config.get_text_config()
    if any(hasattr(module, "get_rope_index") for module in model.modules()) or "mrope_section" in str(
        getattr(text, "rope_parameters", None)
    ):
        raise needs_family(
            f"{name} has positions in time, height and width (M-RoPE), and no family here computes them",
            ", with its `positions`",
        )
    owners = [path for path, module in model.named_modules() if hasattr(module, "get_image_features")]
    decoder = next((path for path, module in model.named_modules() if module is model.get_decoder()), None)
    towers = _towers(model)
    if not owners or decoder is None or not towers:
        missing = "get_image_features" if not owners else "decoder" if decoder is None else "vision tower"
        raise needs_family(f"{name} has no `{missing}` that could be found")
    owner = max(owners, key=len)  # the model's own delegates to it
    prefix = f"{owner}." if owner else ""
    head = model.get_output_embeddings()
    parts = [
        f"{prefix}{child}"
        for child, module in model.get_submodule(owner).named_children()
        if not f"{decoder}.".startswith(f"{prefix}{child}.")
        and module is not head
        and next(module.parameters(), None) is not None
    ]
    tower = next((part for part in parts if f"{towers[0]}.".startswith(f"{part}.")), None)
    if tower is None:
        raise needs_family(f"{name} has its vision tower `{towers[0]}` elsewhere")
    # Parameters of the owner itself, such as LLaVA-NeXT's `image_newline`, are rows of its features.
    own = [f"{prefix}{name}" for name, _ in model.get_submodule(owner).named_parameters(recurse=False)]
    encoder = (tower, *(part for part in parts if part != tower), *own)
    return Structure(owner, encoder, frozenset(inspect.signature(model.forward).parameters))


def _towers(model: PreTrainedModel) -> list[str]:
    vision = getattr(model.config, "vision_config", None)
    named = [] if vision is None else list(model.named_modules())
    return [path for path, module in named if getattr(module, "config", None) is vision] or [
        path
        for path, module in named
        if isinstance(module, PreTrainedModel) and type(module.config) is type(vision)
    ]


class _Processed(NamedTuple):
    tokens: list[int]
    tensors: dict[str, Tensor]


def _placeholder(processor: Any) -> tuple[str, int]:
    """Return the token that stands for an image in a rendered prompt, and its id."""
    tokenizer = processor.tokenizer
    token = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None)
    ids = [] if token is None else tokenizer.encode(str(token), add_special_tokens=False)
    if len(ids) != 1:
        raise needs_family(
            f"{type(processor).__name__} names no `image_token` that is one token of the tokenizer"
            f" ({token!r})"
        )
    return str(token), ids[0]


def _processed(processor: Any, images: Sequence[Image.Image]) -> _Processed:
    """Process a prompt of these images alone."""
    token, _ = _placeholder(processor)
    made = processor(
        text=[token * len(images)], images=[list(images)], return_tensors="pt", add_special_tokens=False
    )
    tensors = {name: made[name] for name in made if name not in TEXT_TENSORS and torch.is_tensor(made[name])}
    # Pixels in bfloat16 would fix the type that the tower computes in.
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    return _Processed(made["input_ids"][0].tolist(), tensors)


@lru_cache(maxsize=4096)
def _tokens_of_size(processor: Any, height: int, width: int) -> tuple[int, ...]:
    # The tokens of an image depend on its size alone.
    return tuple(_processed(processor, [_image((height, width))]).tokens)


@lru_cache(maxsize=8)
def _joins(processor: Any) -> tuple[tuple[str, int], ...]:
    """Find how the processor joins the tensors of several images: the dimension of each.

    Raises:
        NotImplementedError: Tensors or tokens of images depend on other images of the prompt.
    """
    generator = torch.Generator().manual_seed(0)
    images = [_image(size, generator) for size in PROBES]
    name = type(processor).__name__
    try:
        alone, together = [_processed(processor, [image]) for image in images], _processed(processor, images)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise needs_family(f"{name} cannot process a prompt of images alone ({error})") from error
    if together.tokens != alone[0].tokens + alone[1].tokens:
        raise needs_family(f"{name} makes other tokens for two images than for each alone")
    joins = []
    for key, whole in together.tensors.items():
        parts = [one.tensors[key] for one in alone if key in one.tensors]
        fits = [dim for dim in range(whole.ndim) if len(parts) == 2 and _joins_to(parts, dim, whole)]
        dim = next(iter(fits), None)
        if dim is None:
            raise needs_family(
                f"{name} joins `{key}` of two images, {[tuple(part.shape) for part in parts]}, to"
                f" {tuple(whole.shape)} in an unknown way"
            )
        joins.append((key, dim))
    return tuple(joins)


def _joins_to(parts: Sequence[Tensor], dim: int, whole: Tensor) -> bool:
    joined = join_padded(parts, dim)
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        return False
    return torch.allclose(joined.double(), whole.double(), atol=1e-5)  # processors round differently


def join_padded(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors along a dimension, the others padded with zeros at their ends."""
    sizes = torch.tensor([part.shape for part in parts]).amax(0).tolist()
    padded = []
    for part in parts:
        missing = [0 if at == dim else size - part.shape[at] for at, size in enumerate(sizes)]
        ends = [end for size in reversed(missing) for end in (0, size)]
        padded.append(nn.functional.pad(part, ends) if any(ends) else part)
    return padded[0] if len(padded) == 1 else torch.cat(padded, dim)


def joined_tensors(media: Sequence[Medium]) -> dict[str, Tensor]:
    """Join the tensors of images as their processor does."""
    joins: Mapping[str, int] = media[0].facts["joins"]
    return {name: join_padded([medium.tensors[name] for medium in media], dim) for name, dim in joins.items()}


def _image(size: tuple[int, int], generator: torch.Generator | None = None) -> Image.Image:
    shape = (*size, 3)
    pixels = torch.full(shape, BLANK, dtype=torch.uint8)
    if generator is not None:
        pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
