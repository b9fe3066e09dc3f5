# SPDX-License-Identifier: Apache-2.0
"""A conversation with a rollout engine: the prompts of training, one after another. Imports torch."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.logging import disable_progress_bar

from verl.data.bad_rows import BadRowError
from verl.data.chat_template import ChatTemplate
from verl.data.media.decoded import DecodedMedia
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions, chosen_limits
from verl.data.messages import Message, references
from verl.data.prompt_template import PromptFormat
from verl.data.readers import load_processor, load_tokenizer
from verl.distributed.device import is_gpu, resolve_device
from verl.models.families.interface import KINDS, Kind
from verl.models.families.registry import load_config
from verl.workers.rollout.engines import standalone_engine
from verl.workers.rollout.interface import RolloutEngine, RolloutRequest, SamplingOptions

LONGEST = 8192  # tokens of a conversation, if the model allows as many
UNFINISHED = "\ufffd"  # end of a text whose last character still lacks tokens


@dataclass
class Conversation:
    """Messages and media so far, and the engine that continues them."""

    engine: RolloutEngine
    tokenizer: Any
    chat_template: ChatTemplate
    media: MediaLoader | None  # None for a model that reads only text
    prompt_format: PromptFormat  # rewrites each message of the user, as `data.format_prompt` in training
    sampling: SamplingOptions
    system: str | None = None  # first message; None leaves the model's own default
    messages: list[Message] = field(init=False)
    references: dict[str, list[Any]] = field(init=False)
    waiting: list[Kind] = field(init=False)  # media of the next message

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.references = {f"{kind}s": [] for kind in KINDS}
        self.waiting = []

    def add_media(self, kind: Kind, path: str) -> None:
        """Put an image or a video before the text of the next message.

        Raises:
            ValueError: The file cannot be read, or the model reads no media.
        """
        if self.media is None:
            raise BadRowError(f"this model reads no {kind}s")
        found = references(path, kind, None)
        self.media.measure({f"{kind}s": found})
        self.references[f"{kind}s"] += found
        self.waiting.append(kind)

    def ask(self, text: str) -> Iterator[str]:
        """Yield the pieces of the response to a message; both become part of the conversation.

        A response that is not read to its end is kept as far as it was read. A message that cannot be
        answered is removed, and its media with it.
        """
        before = list(self.messages)
        content = self.prompt_format(text, {})
        media = [{"type": kind} for kind in self.waiting]
        parts = [*media, {"type": "text", "text": content}]
        self.messages.append({"role": "user", "content": parts if media else content})
        response = ""
        try:
            for piece in decoded(self._tokens(self._request()), self._decode):
                response += piece
                yield piece
        except ValueError:
            self.messages = before
            for kind in self.waiting:
                self.references[f"{kind}s"].pop()
            raise
        finally:
            self.waiting = []
            if len(self.messages) > len(before):
                self.messages.append({"role": "assistant", "content": response})

    def _request(self) -> RolloutRequest:
        text = self.chat_template(self.messages, True, "the conversation")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        media: DecodedMedia | None = None
        if any(self.references.values()):
            assert self.media is not None, "`add_media` refuses media otherwise"
            media = self.media.decode(self.references)
        return RolloutRequest("conversation", ids, media)

    def _tokens(self, request: RolloutRequest) -> Iterator[list[int]]:
        stream: Callable[..., Iterator[int]] | None = getattr(self.engine, "stream", None)
        if stream is not None:
            yield from ([token] for token in stream(request, self.sampling))
            return
        for finished in self.engine.generate([request], self.sampling):
            yield from (response.token_ids for response in finished)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def decoded(pieces: Iterator[list[int]], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Yield the text of tokens as it grows; a character waits for its last token."""
    tokens: list[int] = []
    shown = 0
    for piece in pieces:
        tokens += piece
        text = decode(tokens)
        if len(text) > shown and not text.endswith(UNFINISHED):
            yield text[shown:]
            shown = len(text)
    text = decode(tokens)
    if len(text) > shown:  # it ends within a character
        yield text[shown:]


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
