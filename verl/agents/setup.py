# SPDX-License-Identifier: Apache-2.0
"""Build what all conversations of a run share, from its options and the files of its model."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.contexts import AgentRules
from verl.agents.conversation import ConversationRules
from verl.agents.endpoint.server import Endpoint
from verl.agents.environments.loading import environment_schemas
from verl.agents.interface import Reference
from verl.agents.media import ConversationMedia, PositionIds
from verl.agents.parsers.interface import NO_CALLS
from verl.agents.parsers.registry import call_format
from verl.agents.rendering import ObservationRenderer
from verl.agents.tools.loading import tool_schemas
from verl.config.multi_turn import MultiTurnConfig
from verl.data.chat_template import ChatTemplate
from verl.data.media.loader import MediaLoader

Schemas = Sequence[Mapping[str, Any]]


def schemas_of(options: MultiTurnConfig) -> list[dict[str, Any]]:
    """Return the schemas of a run's tools and of its environment's; none if its responses have one turn."""
    return [*tool_schemas(options), *environment_schemas(options)] if options.enable else []


def conversation_rules(
    tokenizer: Any,
    media: MediaLoader | None,  # None for a text model
    position_ids: PositionIds | None,
    options: MultiTurnConfig,
    schemas: Schemas,  # of the tools
    *,
    max_tokens: int,
    max_prompt_tokens: int,
    template_variables: Mapping[str, Any],
    override_chat_template: str | None,
) -> ConversationRules:
    """Build the rules of conversations, and check that the chat template can show them.

    Raises:
        ValueError: The template writes no calls or renders observations in ways that differ; or the
            tokenizer does not split them alone as it does within a conversation.
    """
    return _rules(
        tokenizer,
        media,
        position_ids,
        options,
        schemas,
        max_tokens,
        max_prompt_tokens,
        _template(tokenizer, media, template_variables, override_chat_template, schemas),
    )


def agent_rules(
    tokenizer: Any,
    media: MediaLoader | None,  # None for a text model
    position_ids: PositionIds | None,
    options: MultiTurnConfig,
    *,
    max_tokens: int,
    max_prompt_tokens: int,
    max_prompt_images: int,
    template_variables: Mapping[str, Any],
    override_chat_template: str | None,
) -> AgentRules:
    """Build the rules of conversations that an agent leads; it passes its tools with each call.

    Raises:
        ValueError: The chat template cannot show the messages that follow a turn.
    """
    template = _template(tokenizer, media, template_variables, override_chat_template)
    rules = _rules(tokenizer, media, position_ids, options, (), max_tokens, max_prompt_tokens, template)
    return AgentRules(
        rules,
        template,
        shows_tools=rules.format is not NO_CALLS,
        max_prompt_tokens=max_prompt_tokens,
        max_prompt_images=max_prompt_images,
    )


def endpoint_of(rules: AgentRules) -> Endpoint:
    """Start the endpoint that a run's agents call."""
    reader = rules.conversation.media

    def read_url(url: str) -> Reference:
        if reader is None:
            raise ValueError("the model reads no images and videos")
        return reader.loader.on_disk(url)

    return Endpoint(read_url, takes_media=reader is not None, shows_tools=rules.shows_tools)


def _template(
    tokenizer: Any,
    media: MediaLoader | None,
    variables: Mapping[str, Any],
    override: str | None,
    schemas: Schemas = (),
) -> ChatTemplate:
    template = None if media is None else media.processor.chat_template
    return ChatTemplate(tokenizer, template, variables, override, tools=schemas)


def _rules(
    tokenizer: Any,
    media: MediaLoader | None,
    position_ids: PositionIds | None,
    options: MultiTurnConfig,
    schemas: Schemas,
    max_tokens: int,
    max_prompt_tokens: int,
    template: ChatTemplate,
) -> ConversationRules:
    reader = None
    if media is not None and position_ids is not None:
        reader = ConversationMedia(media, position_ids)
    source = (None if media is None else media.processor.chat_template) or tokenizer.chat_template
    placeholders = {} if reader is None else reader.placeholders
    renderer = ObservationRenderer(tokenizer, template, source, placeholders)
    calls_tools = options.environment is None or bool(schemas)
    if options.environment is not None or options.agent is not None:
        renderer.check(max_parallel_calls=0)  # messages follow turns without calls too
    if calls_tools:
        renderer.check(options.max_parallel_calls)
    form = NO_CALLS
    if calls_tools and (options.agent is None or options.format != "auto" or "tools" in source):
        form = call_format(options.format, source)
    return ConversationRules(
        tokenizer, renderer, form, schemas, options, max_tokens, reader, template, max_prompt_tokens
    )
