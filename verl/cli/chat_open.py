# SPDX-License-Identifier: Apache-2.0
"""Opening a conversation: the engine, the tokenizer and what reads media. Imports torch."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar

from verl.cli.chat_session import Conversation
from verl.data.chat_template import ChatTemplate
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions, chosen_limits
from verl.data.prompt_template import PromptFormat
from verl.data.readers import load_processor, load_tokenizer
from verl.distributed.device import is_gpu, resolve_device
from verl.models.families.registry import load_config
from verl.workers.rollout.interface import SamplingOptions
from verl.workers.rollout.standalone import standalone_engine

LONGEST = 8192  # tokens of a conversation, if the model allows as many


@contextmanager
def open_conversation(model: str, options: argparse.Namespace) -> Iterator[Conversation]:
    """Load a model for the options of `verl-chat`."""
    disable_progress_bar()  # of weights, which load in seconds; downloads keep theirs
    device = resolve_device(options.device)
    template = None if options.chat_template is None else str(options.chat_template)
    tokenizer = load_tokenizer(model, template, options.trust_remote_code)
    processor = load_processor(model, template, options.trust_remote_code)
    media = None
    if processor is not None:
        limits = tuple(f"--{name.replace('_', '-')}" for name in chosen_limits(options))
        media = MediaLoader(processor, MediaOptions(options.min_pixels, options.max_pixels, limits=limits))
    config = load_config(model, trust_remote_code=options.trust_remote_code)
    longest = getattr(config.get_text_config(), "max_position_embeddings", LONGEST)
    max_length = min(options.max_length or LONGEST, longest)
    sampling = SamplingOptions(
        temperature=options.temperature, top_p=options.top_p, top_k=options.top_k,
        max_tokens=options.max_tokens,
    )  # fmt: skip
    dtype = options.dtype or ("bf16" if is_gpu(device) else "fp32")
    chat_template = ChatTemplate(tokenizer, None if processor is None else processor.chat_template)
    prompt_format = PromptFormat(None if options.format_prompt is None else str(options.format_prompt))
    with standalone_engine(
        options.engine, model, device=device, dtype=dtype, max_length=max_length, seed=options.seed,
        trust_remote_code=options.trust_remote_code,
    ) as engine:  # fmt: skip
        try:
            yield Conversation(
                engine, tokenizer, chat_template, media, prompt_format, sampling, options.system
            )
        finally:
            chat_template.close()
            prompt_format.close()
