# SPDX-License-Identifier: Apache-2.0
"""Load tokenizers and processors, with an optional chat template of the user."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config.files.model_files import processor_files
from verl.data.prompt_template import read_chat_template
from verl.models.auto import AutoProcessor, AutoTokenizer
from verl.models.modelscope import use_modelscope_hub_if_asked


def load_tokenizer(
    model_path: str | Path,
    override_chat_template: str | None = None,
    trust_remote_code: bool = False,
    *,
    default_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can pad and render chats.

    `model_path` is a folder or a hub name; `override_chat_template` is the path of a Jinja file, and
    `default_template` the chat template of a tokenizer that has none.
    """
    use_modelscope_hub_if_asked()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"`worker.actor.model.model_path` (or `tokenizer_path`): {model_path} is neither a folder with a"
            f" tokenizer nor a hub model that can be reached: {error}"
        ) from error
    if override_chat_template is not None:
        tokenizer.chat_template = read_chat_template(override_chat_template)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = default_template
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{model_path} has no chat template: set `data.override_chat_template` to a Jinja file"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {model_path} has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
