# SPDX-License-Identifier: Apache-2.0
"""Readers of the rows of a model: its tokenizer, its processor, with a template of the user, and media."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.data import RowsConfig
from verl.config.files.model_files import hub_problem, processor_files, tokenizer_of
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.sft import SFTDataConfig
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.prompt_template import no_chat_template, read_chat_template
from verl.models.auto import AutoProcessor, AutoTokenizer, use_modelscope_hub_if_asked
from verl.models.families.interface import MediaFamily, MediaShape
from verl.models.families.registry import family_of, load_config, register_family

ACTOR = "worker.actor.model"  # the section of the policy
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"  # text encoders read no roles
PositionIds = Callable[[Tensor, MediaShape], Tensor | None]  # (L,) to (L,) or (4, L); None counts from 0


def load_tokenizer(
    model_path: str | Path,
    override_chat_template: str | None = None,
    trust_remote_code: bool = False,
    *,
    default_template: str | None = None,
    option: str = ACTOR,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can pad and render chats.

    `model_path` is a folder or a hub name; `override_chat_template` is the path of a Jinja file, and
    `default_template` the chat template of a tokenizer that has none. Errors name the section `option`.
    """
    tokenizer = read_tokenizer(model_path, trust_remote_code, option)
    if override_chat_template is not None:
        tokenizer.chat_template = read_chat_template(override_chat_template)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = default_template
    if tokenizer.chat_template is None:
        raise no_chat_template(model_path)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {model_path} has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_tokenizer(model_path: str | Path, trust_remote_code: bool = False, option: str = ACTOR) -> Any:
    """Load a tokenizer, which may lack a chat template and padding."""
    use_modelscope_hub_if_asked()
    if (problem := hub_problem(str(model_path))) is not None:
        raise ValueError(f"`{option}.model_path` (or `tokenizer_path`) {problem}")
    try:
        return AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"`{option}.model_path` (or `tokenizer_path`): {model_path} is neither a folder with a tokenizer"
            f" nor a hub model that can be reached: {error}"
        ) from error


def load_processor(
    model_path: str | Path, override_chat_template: str | None = None, trust_remote_code: bool = False
) -> Any | None:
    """Load the processor of a model that reads media; None for a text model."""
    use_modelscope_hub_if_asked()
    try:
        processor = AutoProcessor.from_pretrained(str(model_path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if processor_files(Path(model_path)):
            raise ValueError(f"the processor of {model_path} does not load: {error}") from error
        return None
    if not hasattr(processor, "tokenizer"):  # AutoProcessor returns the tokenizer of a text model
        return None
    if override_chat_template is not None:
        processor.chat_template = read_chat_template(override_chat_template)
    elif processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    return processor


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
    *,
    option: str = ACTOR,
) -> Readers:
    """Load the tokenizer of a model, and its processor if it reads media.

    Without a cache, decoded media stay in the process that decoded them. Errors name the section `option`.
    """
    assert model.model_path is not None and model.tokenizer_path is not None, "the config was checked"
    if model.is_pipeline:
        is_own = model.tokenizer_path == model.model_path  # of the hub, downloaded since
        path = tokenizer_of(model.model_path) if is_own else model.tokenizer_path
        tokenizer = load_tokenizer(str(path), template, default_template=PLAIN)
        return Readers(tokenizer, None, None, None)
    register_family(model.family)
    arguments = (model.tokenizer_path, template, model.trust_remote_code)
    tokenizer, processor = load_tokenizer(*arguments, option=option), load_processor(*arguments)
    if processor is not None:
        model_config = load_config(model.model_path, trust_remote_code=model.trust_remote_code)
        family = family_of(model_config)
        if isinstance(family, MediaFamily):
            media = MediaLoader(processor, options, cache, family)
            return Readers(tokenizer, processor, media, partial(family.positions, model_config), tools)
    return Readers(tokenizer, None, None, None, tools)


def media_options(data: RowsConfig, frames: RolloutConfig | SFTDataConfig) -> MediaOptions:
    """Build the media options of loader and workers; `frames` is the section that limits video frames."""
    return MediaOptions.from_data(
        data, num_video_frames=frames.num_video_frames, tokens_per_frame=frames.tokens_per_frame
    )


def count_tokens(tokenizer: Any, text: str) -> int:
    """Return the tokens of a text; a lone surrogate, which has no bytes, counts as a question mark."""
    return len(tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False))
