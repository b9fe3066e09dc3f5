# SPDX-License-Identifier: Apache-2.0
"""Comparisons of a model family's file with the family's own processor and model.

A row is a list of parts in the order of the prompt: texts, `Image.Image`s, `Clip`s and `Sound`s::

    tiny = load_tiny("internvl")
    row = ["look:\\n", random_image(rng, 30, 50), " and\\n", random_clip(rng, 3, 32, 48), "?"]
    assert_tokens_are_the_processors(tiny, row)
    assert_positions_are_the_models(tiny, row)
    assert_features_are_the_models(tiny, [row])
    assert_units_make_the_whole(tiny, media_of(tiny, row))
    assert_inputs_are_the_processors(tiny, row)
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoProcessor

from tests.helpers.closeness import assert_values_close
from verl.models.families.interface import KINDS, MediaFamily, MediaShape, Medium, MediumShape
from verl.models.families.qwen_vl import sampled_fps
from verl.models.families.registry import load_config, media_family_of
from verl.models.hub_names import auto_class
from verl.models.registry import prepare_model
from verl.models.tiny import save_tiny_model
from verl.models.vila.processor import VilaProcessor, grids
from verl.utils.quiet import no_weight_bars


class Tiny(NamedTuple):
    """A tiny random model as its users load it."""

    folder: Path
    family: MediaFamily
    processor: Any
    model: Any  # float32, in evaluation mode

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def owner(self) -> Any:
        """The module with `get_image_features`."""
        return self.model.get_submodule(self.family.media_owner)


class Clip(NamedTuple):
    """The sampled frames of a video."""

    frames: np.ndarray  # (T, H, W, 3) uint8
    meta: Mapping[str, Any]  # as `verl.data.media.video` writes it
    sound: np.ndarray | None = None  # (N,) float32, if it is heard


class Sound(NamedTuple):
    """The samples of an audio clip, 16,000 a second."""

    samples: np.ndarray  # (N,) float32


Medial = Image.Image | Clip | Sound
Part = str | Medial
_folders = tempfile.TemporaryDirectory(prefix="tiny-families-")


@cache
def load_tiny(kind: str, **options: Any) -> Tiny:
    """Write the tiny model of `--kind`, once in a process, and load it with transformers' auto classes."""
    folder = Path(tempfile.mkdtemp(dir=_folders.name, prefix=f"{kind}-"))
    return open_tiny(save_tiny_model(folder, kind, **options))


def open_tiny(folder: Path) -> Tiny:
    model = load_own(folder).eval()
    family = media_family_of(model.config)
    family.repair(model)
    return Tiny(folder, family, AutoProcessor.from_pretrained(folder), model)


def load_own(folder: Path, **options: Any) -> Any:
    """Load a model in float32 with transformers alone."""
    config = load_config(folder)
    with no_weight_bars():
        return auto_class(config).from_pretrained(folder, config=config, dtype=torch.float32, **options)


# --- rows


def random_image(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Return smooth random colors, which resizing keeps different from each other."""
    coarse = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def random_clip(
    rng: np.random.Generator, num_frames: int, height: int, width: int, fps: float = 8.0, step: int = 3
) -> Clip:
    """Return every `step`-th frame of a random video."""
    frames = np.stack([np.asarray(random_image(rng, height, width)) for _ in range(num_frames)])
    total = num_frames * step
    meta = {
        "total_num_frames": total, "fps": fps, "duration": total / fps,
        "frames_indices": list(range(0, total, step)), "video_backend": "pyav", "do_sample_frames": False,
    }  # fmt: skip
    return Clip(frames, meta)


def random_sound(rng: np.random.Generator, seconds: float) -> Sound:
    """Return a few tones of random pitch, one after another."""
    pitches = np.repeat(rng.uniform(100, 2000, 5), -(-int(seconds * 16000) // 5))[: int(seconds * 16000)]
    return Sound(np.sin(np.cumsum(pitches) * 2 * np.pi / 16000).astype(np.float32))


def random_size(rng: np.random.Generator, low: int, high: int) -> tuple[int, int]:
    """Return height and width; some are square, some at the limits."""
    height, width = (int(2 ** rng.uniform(np.log2(low), np.log2(high))) for _ in range(2))
    kind = rng.integers(8)
    if kind == 0:
        return height, height
    return (low, high) if kind == 1 else (high, low) if kind == 2 else (height, width)


def random_row(
    rng: np.random.Generator, low: int, high: int, kinds: Sequence[str], shortest_s: float = 0.1
) -> list[Part]:
    """Return one to four media with texts before, between and after them.

    Its videos have equally many frames, because some processors refuse others in one call.
    """
    row: list[Part] = ["What colour?\n"]
    frames = int(rng.integers(2, 6))
    for _ in range(rng.integers(1, 5)):
        kind = rng.choice(list(kinds))
        if kind == "image":
            row += [random_image(rng, *random_size(rng, low, high)), "the answer\n"]
        elif kind == "audio":
            row += [random_sound(rng, rng.uniform(shortest_s, 5.0)), "\nblue\n"]
        else:
            row += [random_clip(rng, frames, *random_size(rng, low, high)), "\nred\n"]
    return [*row, "How many?"]


def images_of(row: Iterable[Part]) -> list[Image.Image]:
    return [part for part in row if isinstance(part, Image.Image)]


def clips_of(row: Iterable[Part]) -> list[Clip]:
    return [part for part in row if isinstance(part, Clip)]


def sounds_of(row: Iterable[Part]) -> list[Sound]:
    return [part for part in row if isinstance(part, Sound)]


# --- a row through the family


def render(tiny: Tiny, row: Sequence[Part]) -> str:
    """Return the row as a user's message, rendered by the chat template."""
    names = {str: "text", Clip: "video", Sound: "audio"}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": names.get(type(part), "image")}
        for part in row
    ]
    return tiny.processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )


def shape_of(tiny: Tiny, part: Medial) -> MediumShape:
    """Return the shape that the family finds from what a file's header says."""
    if isinstance(part, Image.Image):
        return tiny.family.image_shape(tiny.processor, part.height, part.width)
    if isinstance(part, Sound):
        return tiny.family.audio_shape(tiny.processor, len(part.samples))
    num_frames, height, width, _ = part.frames.shape
    meta = part.meta if part.sound is None else {**part.meta, "num_samples": len(part.sound)}
    return tiny.family.video_shape(tiny.processor, num_frames, height, width, meta)


def media_shape_of(tiny: Tiny, row: Sequence[Part]) -> MediaShape:
    parts = images_of(row), clips_of(row), sounds_of(row)
    return MediaShape(*([shape_of(tiny, part) for part in of_kind] for of_kind in parts))


def expanded(tiny: Tiny, row: Sequence[Part]) -> Tensor:
    """Return the row's tokens (L,), expanded by the family without looking at pixels."""
    prompt_ids = tiny.processor.tokenizer.encode(render(tiny, row), add_special_tokens=False)
    return torch.tensor(tiny.family.expand(tiny.processor, prompt_ids, media_shape_of(tiny, row)))


def medium_of(tiny: Tiny, part: Medial) -> Medium:
    """Return what the encoder reads of a medium."""
    facts = shape_of(tiny, part).facts
    if isinstance(part, Image.Image):
        return Medium("image", tiny.family.image_inputs(tiny.processor, part), facts)
    if isinstance(part, Sound):
        return heard(tiny, part.samples)
    return Medium("video", tiny.family.video_inputs(tiny.processor, part.frames, part.meta), facts)


def media_of(tiny: Tiny, row: Sequence[Part]) -> list[Medium]:
    """Return the row's media in the order of the prompt, the sound of a clip after it."""
    media = []
    for part in row:
        if not isinstance(part, str):
            media.append(medium_of(tiny, part))
        if isinstance(part, Clip) and part.sound is not None:
            media.append(heard(tiny, part.sound))
    return media


def heard(tiny: Tiny, samples: np.ndarray) -> Medium:
    facts = tiny.family.audio_shape(tiny.processor, len(samples)).facts
    return Medium("audio", tiny.family.audio_inputs(tiny.processor, samples), facts)


def features_of(tiny: Tiny, media: Sequence[Medium]) -> list[Tensor]:
    """Return the features of each medium from one call of the model's encoders, prepared for packing."""
    with torch.no_grad():
        return prepared(tiny.folder)(media=media, only_encode=True)


@cache
def prepared(folder: Path) -> Any:
    model = load_own(folder).eval()
    prepare_model(model)
    return model


# --- a row through the family's own processor and model


def own_inputs_of(tiny: Tiny, row: Sequence[Part], **options: Any) -> dict[str, Tensor]:
    """Return what the processor itself makes of a row."""
    arguments: dict[str, Any] = {"text": [render(tiny, row)], "return_tensors": "pt", **options}
    if images := images_of(row):
        arguments["images"] = images
    if clips := clips_of(row):
        metas = [{k: v for k, v in clip.meta.items() if k != "do_sample_frames"} for clip in clips]
        arguments |= {"videos": [clip.frames for clip in clips], "video_metadata": metas}
        arguments["do_sample_frames"] = False
        if "audio" in tiny.family.kinds:  # such processors have their own defaults for what the files say
            size = dict(tiny.processor.video_processor.size)
            arguments["videos_kwargs"] = {"fps": sampled_fps(clips[0].meta), "size": size}
    heard = [part.samples if isinstance(part, Sound) else getattr(part, "sound", None) for part in row]
    sounds = [samples for samples in heard if samples is not None]
    if sounds:  # padded to the longest clip of a call, its end would be mirrored
        arguments |= {"audio": sounds, "audio_kwargs": {"padding": "max_length"}}
    if any(clip.sound is not None for clip in clips):
        arguments["videos_kwargs"]["use_audio_in_video"] = True
    if not tiny.processor.tokenizer.init_kwargs.get("add_bos_token"):
        arguments["add_special_tokens"] = False
    if isinstance(tiny.processor, VilaProcessor):
        return _vila_inputs(tiny.processor, arguments)
    return dict(tiny.processor(**arguments))


def _vila_inputs(processor: VilaProcessor, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of VILA's model for one rendered prompt and its media."""
    [prompt], images, videos = (arguments.get(name, ()) for name in ("text", "images", "videos"))
    shapes = [grids(processor.config, image.height, image.width) for image in images]
    frames = [len(video) for video in videos]
    expanded = {
        processor.image_token_id: iter([processor.image_tokens(shape) for shape in shapes]),
        processor.video_token_id: iter([processor.video_tokens(count) for count in frames]),
    }
    ids: list[int] = []
    for token in processor.encode(prompt):
        ids += next(expanded[token]) if token in expanded else [token]
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if images:
        inputs["pixel_values"] = torch.cat([processor.image_pixels(image) for image in images])
        inputs["image_grids"] = shapes
    if videos:
        inputs["pixel_values_videos"] = torch.cat([processor.frame_pixels(video) for video in videos])
        inputs["video_frames"] = frames
    return inputs


def own_features_of(tiny: Tiny, part: Medial) -> Tensor:
    """Return the features (tokens, hidden size x (1 + levels)) that the model computes for one medium."""
    owner = tiny.owner
    if isinstance(part, Sound) or not hasattr(owner, "get_image_features"):
        return inserted_features_of(tiny, part)
    is_video = isinstance(part, Clip) and hasattr(owner, "get_video_features")
    function = owner.get_video_features if is_video else owner.get_image_features
    inputs = own_inputs_of(tiny, [part])
    known = signature(function).parameters
    with torch.no_grad():
        encoded = function(**{name: inputs[name] for name in inputs if name in known}, return_dict=True)
    levels = [encoded.pooler_output, *(getattr(encoded, "deepstack_features", None) or [])]
    return torch.cat([torch.cat([part.flatten(0, -2) for part in level]) for level in levels], -1)


def inserted_features_of(tiny: Tiny, part: Medial) -> Tensor:
    """Return what the model's own forward puts where one medium is: (tokens, hidden size)."""
    inputs, embeddings = own_inputs_of(tiny, [part, "?"]), []

    def keep(_decoder: Any, _args: Any, kwargs: Any) -> None:
        embeddings.append(kwargs["inputs_embeds"][0])

    handle = tiny.model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        tiny.model(**inputs)
    handle.remove()
    found = tiny.family.media_tokens(tiny.config, inputs["input_ids"][0])
    return embeddings[0][torch.cat([*found.values()])]


# --- comparisons


def assert_tokens_are_the_processors(tiny: Tiny, row: Sequence[Part]) -> None:
    """Assert that tokens counted from sizes equal the tokens that the processor makes from pixels."""
    own = own_inputs_of(tiny, row)["input_ids"]
    assert expanded(tiny, row).tolist() == torch.as_tensor(own)[0].tolist()


def assert_image_sizes_are_the_processors(
    tiny: Tiny, rng: np.random.Generator, count: int, low: int, high: int
) -> None:
    """Assert that an image of any size has as many tokens as the processor gives it."""
    sizes = [(low, low), (low, high), (high, low), (high, high)]
    for size in sizes + [random_size(rng, low, high) for _ in range(count)]:
        assert_tokens_are_the_processors(tiny, [Image.new("RGB", size), "What colour?"])


def assert_media_tokens_match(tiny: Tiny, row: Sequence[Part]) -> None:
    """Assert that there is a token for every feature of each kind."""
    media = media_of(tiny, row)
    counts = dict.fromkeys(KINDS, 0)
    for medium, features in zip(media, features_of(tiny, media) if media else [], strict=True):
        counts[tiny.family.token_kind(medium.kind)] += len(features)
    found = tiny.family.media_tokens(tiny.config, expanded(tiny, row))
    assert {kind: len(found.get(kind, ())) for kind in KINDS} == counts


def assert_features_are_the_models(tiny: Tiny, rows: Sequence[Sequence[Part]]) -> None:
    """Assert that one call for the media of all rows makes the features that each has alone."""
    parts = [part for row in rows for part in row if not isinstance(part, str)]
    encoded = features_of(tiny, [medium_of(tiny, part) for part in parts])
    assert len(encoded) == len(parts)
    for part, features in zip(parts, encoded, strict=True):
        own = own_features_of(tiny, part)  # of audio without deepstack levels
        assert_values_close(features, pad(own, (0, features.shape[-1] - own.shape[-1])))


def assert_units_make_the_whole(tiny: Tiny, media: Sequence[Medium]) -> None:
    """Assert that the units of each medium, encoded apart, are the features of the whole."""
    for medium in media:
        whole = features_of(tiny, [medium])[0]
        units = tiny.family.units(tiny.config, medium.facts)
        assert sum(units) == len(whole)
        for stop in range(1, len(units)):
            parts = [(0, stop), (stop, len(units))]
            cuts = [tiny.family.cut(tiny.config, medium, *part) for part in parts]
            assert [tiny.family.units(tiny.config, cut.facts) for cut in cuts] == [units[:stop], units[stop:]]
            assert_values_close(torch.cat(features_of(tiny, cuts)), whole)


def assert_positions_are_the_models(tiny: Tiny, row: Sequence[Part]) -> None:
    """Assert that positions are transformers'; a model without `get_rope_index` counts from 0."""
    input_ids = expanded(tiny, row)
    found = tiny.family.positions(tiny.config, input_ids, media_shape_of(tiny, row))
    if not hasattr(tiny.owner, "get_rope_index"):
        assert found is None
        return
    inputs = own_inputs_of(tiny, row, return_mm_token_type_ids=True)
    if "feature_attention_mask" in inputs:
        inputs["audio_seqlens"] = inputs["feature_attention_mask"].sum(-1)
    if "video_second_per_grid" in inputs:
        inputs["second_per_grids"] = torch.as_tensor(inputs["video_second_per_grid"])
    inputs["use_audio_in_video"] = any(clip.sound is not None for clip in clips_of(row))
    known = signature(tiny.owner.get_rope_index).parameters
    own, _ = tiny.owner.get_rope_index(**{name: inputs[name] for name in inputs if name in known})
    assert found is not None
    assert found[0].tolist() == list(range(len(input_ids)))
    assert found[1:].tolist() == own[:, 0].tolist()


def assert_inputs_are_the_processors(tiny: Tiny, row: Sequence[Part]) -> None:
    """Assert that the model's own forward computes the same from the family's inputs.

    Positions are the family's: give rows in which they are transformers' own.
    """
    has_index = hasattr(tiny.owner, "get_rope_index")
    theirs = own_inputs_of(tiny, row, **({"return_mm_token_type_ids": True} if has_index else {}))
    input_ids = expanded(tiny, row)
    positions = tiny.family.positions(tiny.config, input_ids, media_shape_of(tiny, row))
    media = media_of(tiny, row)
    ours = tiny.family.own_inputs(media) if media else {}
    ours |= {"input_ids": input_ids[None], "attention_mask": torch.ones_like(input_ids)[None]}
    ours |= tiny.family.own_arguments(tiny.config, ours["input_ids"])
    if positions is not None:
        ours["position_ids"] = positions[:, None]
    theirs["use_audio_in_video"] = any(clip.sound is not None for clip in clips_of(row))
    known = signature(tiny.model.forward).parameters
    with torch.no_grad():
        found, expected = (
            tiny.model(**{name: inputs[name] for name in inputs if name in known}).logits
            for inputs in (ours, theirs)
        )
    assert_values_close(found, expected)
