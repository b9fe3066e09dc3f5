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
    template = None if media is None else media.processor.chat_template
    reader = None
    if media is not None and position_ids is not None:
        reader = ConversationMedia(media, position_ids)
    source = template or tokenizer.chat_template
    chat_template = ChatTemplate(
        tokenizer, template, template_variables, override_chat_template, tools=schemas
    )
    placeholders = {} if reader is None else reader.placeholders
    renderer = ObservationRenderer(tokenizer, chat_template, source, placeholders)
    if options.environment is not None or options.agent is not None:
        renderer.check(max_parallel_calls=0)  # they answer a turn without calls too
    if schemas or ("tools" in source if options.agent is not None else options.environment is None):
        renderer.check(options.max_parallel_calls)
        form = call_format(options.format, source)
    else:
        form = NO_CALLS
    return ConversationRules(
        tokenizer, renderer, form, schemas, options, max_tokens, reader, chat_template, max_prompt_tokens
    )


def agent_rules(rules: ConversationRules, *, max_prompt_images: int) -> AgentRules:
    """Return the rules of conversations that an agent leads, which passes its tools with each call."""
    assert rules.chat_template is not None and rules.max_prompt_tokens is not None, (
        "`conversation_rules` has both"
    )
    return AgentRules(
        rules,
        rules.chat_template,
        shows_tools=rules.format is not NO_CALLS,
        max_prompt_tokens=rules.max_prompt_tokens,
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
