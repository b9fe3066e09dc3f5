# SPDX-License-Identifier: Apache-2.0
"""Readers of the rows of a model: its tokenizer, its processor and a loader of media."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from verl.config.data import RowsConfig
from verl.config.files.model_files import tokenizer_of
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.sft import SFTDataConfig
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.tokenizer import load_processor, load_tokenizer
from verl.models.families.interface import MediaFamily, MediaShape
from verl.models.families.registry import family_of, load_config, register_family

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"  # text encoders read no roles
PositionIds = Callable[[Tensor, MediaShape], Tensor | None]  # (L,) to (L,) or (4, L); None counts from 0


class Readers(NamedTuple):
    """The tokenizer and processor of a model, its media loader and position ids, and the tools it calls."""

    tokenizer: Any
    processor: Any | None  # None for a text model, which has no media
    media: MediaLoader | None
    position_ids: PositionIds | None
    tools: Sequence[Mapping[str, Any]] = ()  # schemas, for chat templates


def load_readers(
    model: ModelConfig,
    template: str | None,
    options: MediaOptions,
    cache: MediaCache | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Readers:
    """Load the tokenizer of a model, and its processor if it reads media.

    Without a cache, decoded media stay in the process that decoded them.
    """
    assert model.model_path is not None and model.tokenizer_path is not None, "the config was checked"
    if model.is_pipeline:
        is_own = model.tokenizer_path == model.model_path  # of the hub, downloaded since
        path = tokenizer_of(model.model_path) if is_own else model.tokenizer_path
        tokenizer = load_tokenizer(str(path), template, default_template=PLAIN)
        return Readers(tokenizer, None, None, None)
    register_family(model.family)
    arguments = (model.tokenizer_path, template, model.trust_remote_code)
    tokenizer, processor = load_tokenizer(*arguments), load_processor(*arguments)
    if processor is None:
        return Readers(tokenizer, None, None, None, tools)
    model_config = load_config(model.model_path, trust_remote_code=model.trust_remote_code)
    family = family_of(model_config)
    if not isinstance(family, MediaFamily):
        return Readers(tokenizer, None, None, None, tools)
    media = MediaLoader(processor, options, cache, family)
    positions = partial(family.positions, model_config)
    return Readers(tokenizer, processor, media, positions, tools)


def media_options(data: RowsConfig, frames: RolloutConfig | SFTDataConfig) -> MediaOptions:
    """Build the media options of loader and workers; `frames` is the section that limits video frames."""
    return MediaOptions.from_data(
        data, num_video_frames=frames.num_video_frames, tokens_per_frame=frames.tokens_per_frame
    )
