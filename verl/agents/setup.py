# SPDX-License-Identifier: Apache-2.0
"""Build what all conversations of a run share, from its options and its model's files."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from verl.agents.endpoint.server import Endpoint
from verl.agents.environments.loading import load_environments
from verl.agents.interface import Observation
from verl.agents.media import ConversationMedia
from verl.agents.parsers.interface import NO_CALLS
from verl.agents.parsers.registry import call_format
from verl.agents.rendering import ObservationRenderer, user_message
from verl.agents.rules import ConversationRules
from verl.agents.tools.loading import load_tools
from verl.config.data import DataConfig
from verl.config.multi_turn import MultiTurnConfig
from verl.data.chat_template import ChatTemplate
from verl.data.readers import Readers

SECTION = "worker.rollout.multi_turn"


def schemas_of(options: MultiTurnConfig) -> list[dict[str, Any]]:
    """Return the schemas of a run's tools and of its environment's; none if its responses have one turn."""
    if not options.enable:
        return []
    members = [*load_tools(options), *load_environments(options)]
    return [dict(schema) for member in members for schema in member.schemas]


def conversation_rules(
    readers: Readers,
    options: MultiTurnConfig,
    *,
    max_tokens: int,
    max_prompt_tokens: int,
    max_prompt_images: int = 0,
    template_variables: Mapping[str, Any],
    override_chat_template: str | None,
) -> ConversationRules:
    """Build the rules of conversations, which `check_conversations` checks once for a run.

    Raises:
        ValueError: The template writes no calls, or cannot show observations.
    """
    tokenizer, schemas, template, media = readers.tokenizer, readers.tools, None, None
    if readers.media is not None and readers.position_ids is not None:
        template = readers.media.processor.chat_template
        media = ConversationMedia(readers.media, readers.position_ids)
    source = template or tokenizer.chat_template
    chat_template = ChatTemplate(
        tokenizer, template, template_variables, override_chat_template, tools=schemas
    )
    placeholders = {} if media is None else media.placeholders
    renderer = ObservationRenderer(tokenizer, chat_template, source, placeholders)
    has_calls = schemas or ("tools" in source if options.agent is not None else options.environment is None)
    form = call_format(options.format, source) if has_calls else NO_CALLS
    return ConversationRules(
        tokenizer, renderer, form, schemas, options, max_tokens, max_prompt_tokens, media, max_prompt_images
    )


def check_conversations(readers: Readers, data: DataConfig, options: MultiTurnConfig) -> ConversationRules:
    """Return the rules of a run's conversations, which its chat template can show.

    Needs the files of the model and no device, so that a run can stop before it starts.

    Raises:
        ValueError: The template writes no calls or renders observations in ways that differ; or the
            tokenizer does not split them alone as it does within a conversation; or responses have no room
            for an observation between two turns.
    """
    try:
        rules = conversation_rules(
            readers,
            options,
            max_tokens=data.max_response_length,
            max_prompt_tokens=data.max_prompt_length,
            template_variables=data.apply_chat_template_kwargs,
            override_chat_template=data.override_chat_template,
        )
        if options.environment is not None or options.agent is not None:
            rules.renderer.check(max_parallel_calls=0)  # they answer a turn without calls too
        if rules.reads_calls:
            rules.renderer.check(options.max_parallel_calls)
    except ValueError as error:
        raise ValueError(f"`{SECTION}.enable=true`: {error}") from error
    _check_schemas(rules)
    answer = rules.renderer.after_turn(rules.tokenizer.eos_token_id, (), [user_message(Observation())])
    for problem in options.length_problems(data.max_response_length, len(answer)):
        raise ValueError(problem)
    return rules


def _check_schemas(rules: ConversationRules) -> None:
    """Refuse special tokens in the schemas of a run's own tools, which its prompts show as they are."""
    given = {"tools": ", ".join(rules.options.tools), "tool_config_path": rules.options.tool_config_path}
    given["environment"] = rules.options.environment
    options = ", ".join(f"`{SECTION}.{name}={value}`" for name, value in given.items() if value)
    for schema in rules.schemas:
        if found := rules.renderer.reserved.search(str(schema)):
            raise ValueError(
                f"{options}: the names, descriptions and values of the tool `{schema['function']['name']}`"
                f" must hold no special token of the model, got {found[0]!r}: write it otherwise, such as"
                f" {rules.renderer.plain(found[0])!r}"
            )


def endpoint_of(rules: ConversationRules, on_call: Callable[[Hashable], None]) -> Endpoint:
    """Start the endpoint that a run's agents call; `on_call` is told the conversation of each call."""
    read_url = None if rules.media is None else rules.media.loader.on_disk
    return Endpoint(read_url, shows_tools=rules.reads_calls, on_call=on_call)
