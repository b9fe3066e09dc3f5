# SPDX-License-Identifier: Apache-2.0
"""Conversations of a tokenizer without an engine: turns are texts."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from tests.helpers.tool_templates import tool_tokenizer
from verl.agents.conversation import Conversation
from verl.agents.interface import Message, ToolCall
from verl.agents.media import ConversationMedia
from verl.agents.parsers.registry import CALL_FORMATS
from verl.agents.rendering import ObservationRenderer, Template
from verl.agents.row import Prompt, Row, SampledTurn
from verl.agents.rules import ConversationRules
from verl.config.multi_turn import MultiTurnConfig

PROMPT = [{"role": "user", "content": "What is 2+3?"}]
INTEGER = {"type": "integer"}
ADD = {"name": "add", "parameters": {"properties": {"a": INTEGER, "b": INTEGER}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def template_of(tokenizer: Any, source: str | None = None, **variables: Any) -> Template:
    """Return a renderer of messages like `ChatTemplate`, in this process."""

    def render(
        messages: Sequence[Message], add_generation_prompt: bool, name: str, tools: Sequence[Any] = ()
    ) -> str:
        given = {**variables, "tools": list(tools)} if tools else variables
        try:
            return tokenizer.apply_chat_template(
                list(messages), chat_template=source, add_generation_prompt=add_generation_prompt,
                tokenize=False, **given,
            )  # fmt: skip
        except TemplateError as error:
            raise ValueError(str(error)) from error

    return render


def renderer_of(tokenizer: Any, media: ConversationMedia | None = None) -> ObservationRenderer:
    source = tokenizer.chat_template if media is None else media.loader.processor.chat_template
    placeholders = {} if media is None else media.placeholders
    return ObservationRenderer(tokenizer, template_of(tokenizer, source), source, placeholders)


def rules_of(
    template: str = "hermes",
    max_tokens: int = 1000,
    max_prompt_tokens: int = 400,
    *,
    format: str = "hermes",
    tokenizer: Any = None,
    media: ConversationMedia | None = None,
    schemas: Sequence[Any] = ({"type": "function", "function": ADD},),
    **options: Any,
) -> ConversationRules:
    tokenizer = tokenizer or tool_tokenizer(template)
    return ConversationRules(
        tokenizer,
        renderer_of(tokenizer, media),
        CALL_FORMATS[format],
        schemas,
        MultiTurnConfig(enable=True, **options),
        max_tokens,
        max_prompt_tokens,
        media,
    )


def encode(rules: ConversationRules, text: str) -> list[int]:
    return rules.tokenizer.encode(text, add_special_tokens=False)


def begin(rules: ConversationRules, messages: Sequence[Message] = PROMPT, media: Any = None) -> Conversation:
    source = None if rules.media is None else rules.media.loader.processor.chat_template
    text = template_of(rules.tokenizer, source)(messages, True, "the prompt")
    return Conversation(rules, Row(Prompt(encode(rules, text), messages, media), rules.media))


def say(conversation: Conversation, text: str, reason: str = "stop", at: float = 0.0) -> list[ToolCall]:
    """Add a turn of that text, whose log-probs are -1, -2, ..."""
    tokens = encode(conversation.rules, text)
    log_probs = [-1.0 - number for number in range(len(tokens))]
    return conversation.add_turn(SampledTurn(tokens, log_probs, reason), at)


def turn_of(tokens: list[int], log_prob: float = -1.0, reason: str = "stop", **more: Any) -> SampledTurn:
    """Return a sampled turn whose tokens have the same log-prob."""
    return SampledTurn(tokens, [log_prob] * len(tokens), reason, **more)
