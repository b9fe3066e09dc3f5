# SPDX-License-Identifier: Apache-2.0
"""Conversations led by an agent: calls of the policy, assembled into contexts by prefix.

A call whose messages begin with those of a known context, its answer included, continues it: the tokens of
that context stay as they were sampled, and only the new messages are tokenized. Any other call begins a new
context: the first one, one after the agent shortened or edited its history, a retry, one of several at once.
Nothing here waits, serves or reads a clock.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from verl.agents.contexts import (
    AgentContext,
    AnsweredCall,
    FinishedConversation,
    OpenCall,
    empty_response,
    joined_response,
)
from verl.agents.endpoint.chat_messages import ApiError, ChatMessage, assistant_message
from verl.agents.endpoint.replies import Reply
from verl.agents.endpoint.requests import ChatRequest
from verl.agents.interface import AgentResult, Message, Observation, Reference, StopReason, ToolCall, Turn
from verl.agents.parsers.interface import THOUGHT, text_before_calls, without_thought
from verl.agents.rendering import UNNAMED, call_id
from verl.agents.row import SampledTurn
from verl.agents.rules import ConversationRules
from verl.data.media.references import MediaData
from verl.models.families.interface import Kind, MediaShape

LONGEST_TOKEN = 256  # characters; a text with more than as many for each token that fits is not tokenized
NAME = "the messages of a call"  # in errors of templates


class AgentConversation:
    """The state of one conversation that an agent leads.

    Example::

        call = conversation.begin(request)
        ...  # the engine samples
        reply = conversation.complete(call, turn)
        ...  # the agent ends
        response = conversation.finish(result)

    `at` is in seconds since the conversation started.
    """

    def __init__(self, rules: ConversationRules, messages: Sequence[Message]) -> None:
        self.rules, self._messages = rules, messages  # of the row of the data set
        self._contexts: list[AgentContext] = []
        self._open: list[OpenCall] = []
        self._num_calls = self._num_tool_calls = 0
        self._is_cut = False  # the last call was cut off or had no room

    def begin(self, request: ChatRequest, at: float = 0.0) -> OpenCall | None:
        """Return the call to sample; None if it must wait for room that another one may use.

        Raises:
            ApiError: There is none.
        """
        limit = self._options.max_assistant_turns
        if limit is not None and self._num_calls >= limit:
            self._is_cut = True
            raise ApiError(
                f"the conversation has {limit} turns (`max_assistant_turns`)", code="max_assistant_turns"
            )
        self._check_size(request)
        call = self._continued(request, at) or self._begun(request, at)
        max_tokens = self._room - call.num_observed
        if max_tokens < 1:
            if self._open:
                return None
            self._is_cut, most = True, self.rules.max_tokens
            raise _context_full(
                f"the messages leave no room: the conversation may have {most} tokens after its first"
                f" prompt (`data.max_response_length`), {most - self._room} of them are used, and"
                f" these take {call.num_observed}"
            )
        limits = (max_tokens, request.max_tokens, self._options.max_tokens_per_turn)
        call.max_tokens = min(each for each in limits if each is not None)
        call.context.is_busy = True
        if call.piece is None:
            self._contexts.append(call.context)
        self._open.append(call)
        self._num_calls += 1
        return call

    def complete(self, call: OpenCall, turn: SampledTurn, at: float = 0.0) -> Reply:
        """Append the sampled turn of a call and return how it is answered."""
        token_ids, context = turn.token_ids, call.context
        is_whole = turn.finish_reason != "length"
        self._close(call)
        message = self._answer(call, token_ids, is_whole)  # may fail, and changes no context
        if call.piece is not None:
            new = call.request.messages[len(context.chat) :]
            observations = tuple(Observation(one.text, *_by_kind(one.media)) for one in new)
            seconds = call.at - context.calls[-1].ended_at
            context.turns[-1] = replace(context.turns[-1], observations=observations, seconds=seconds)
            context.row.add_piece(call.piece)
        start, prompt_tokens = len(context.row.response), len(context.row.expanded_prompt)
        context.row.add_sampled(turn)
        context.chat = [*call.request.messages, message]
        context.turns.append(Turn(start, start + len(token_ids), message.calls))
        context.calls.append(AnsweredCall(call.number, at, message.call_ids))
        context.add_turn(call.rendered, self.rules.text_of(token_ids), is_whole)
        self._is_cut = not is_whole
        decode = self.rules.tokenizer.decode
        return Reply(
            message,
            "length" if not is_whole else "tool_calls" if message.calls else "stop",
            prompt_tokens + start,
            list(token_ids),
            list(turn.log_probs),
            [decode([token]) for token in token_ids] if call.request.has_log_probs else [],
        )

    def cancel(self, call: OpenCall) -> None:
        """Drop a call that is not sampled to its end."""
        self._close(call)
        if not call.context.turns:
            self._contexts.remove(call.context)

    def finish(
        self, result: AgentResult, reason: StopReason = StopReason.STOP, is_masked: bool = False
    ) -> FinishedConversation:
        """Return the response: the first context after its prompt, and every later one as a whole.

        The `result` is failed if the agent raised, hung or died. A `reason` other than stop cut it off.
        """
        for call in list(self._open):
            self.cancel(call)
        contexts = [context for context in self._contexts if context.turns]
        short = [one for one in contexts if len(one.row.expanded_prompt) <= self.rules.max_prompt_tokens]
        first = min(short, key=lambda one: not one.is_first, default=None)
        if first is None:
            messages = tuple(self._messages)
            return empty_response(self.rules.tokenizer, messages, reason, _failures(result))
        self._give_rewards(contexts, result)
        contexts.sort(key=lambda context: context is not first)
        latest = max(contexts, key=lambda context: context.calls[-1].number)
        finish_reason = "length" if self._is_cut else reason.finish_reason
        messages = _plain_messages(latest.chat)
        return joined_response(contexts, messages, reason, finish_reason, is_masked=is_masked)

    @property
    def num_turns(self) -> int:
        return sum(len(context.turns) for context in self._contexts)

    @property
    def turn_ended_at(self) -> float:
        """When the last turn was sampled; 0 before the first."""
        return max((call.ended_at for context in self._contexts for call in context.calls), default=0.0)

    @property
    def _options(self) -> Any:
        return self.rules.options

    @property
    def _room(self) -> int:
        used = sum(context.num_tokens for context in self._contexts if context.turns)
        return self.rules.max_tokens - used - sum(call.num_observed + call.max_tokens for call in self._open)

    def _check_size(self, request: ChatRequest) -> None:
        limit = LONGEST_TOKEN * (self.rules.max_prompt_tokens + self.rules.max_tokens)
        length = sum(len(message.text) for message in request.messages)
        if length > limit:
            self._is_cut = True
            raise _context_full(f"the messages have {length} characters, which fill any context of this run")

    def _continued(self, request: ChatRequest, at: float) -> OpenCall | None:
        found = [context for context in self._contexts if context.is_continued_by(request)]
        if not found:
            return None
        context = max(found, key=lambda one: len(one.chat))
        new = request.messages[len(context.chat) :]
        media, shape = self._media_of(new, context)
        calls, messages = _called(context, new), [one.message for one in new]
        renderer = self.rules.renderer
        try:
            tokens = renderer.after_turn(context.row.token_ids[-1], calls, messages)
        except (ValueError, TimeoutError) as error:
            raise ApiError(f"the messages cannot be rendered: {error}", param="messages") from error
        piece, (_, rendered) = context.row.piece(tokens, media, shape), renderer.following(calls, messages)
        return OpenCall(self._num_calls, request, context, piece, 0, at, rendered)

    def _begun(self, request: ChatRequest, at: float) -> OpenCall:
        """Return a call whose messages are rendered as a whole."""
        media, _ = self._media_of(request.messages, None)
        try:
            row = self.rules.new_row(_plain_messages(request.messages), media, NAME, request.tools)
        except (ValueError, TimeoutError) as error:
            raise ApiError(f"the messages cannot be rendered: {error}", param="messages") from error
        is_first = not any(context.is_first for context in self._contexts)
        limit = self.rules.max_prompt_tokens
        if is_first and len(row.expanded_prompt) > limit:
            self._is_cut = True
            raise _context_full(
                f"the messages have {len(row.expanded_prompt)} tokens, and the first prompt of a"
                f" conversation at most {limit} (`data.max_prompt_length`)"
            )
        context = AgentContext(row, tools=request.tools, is_first=is_first)
        return OpenCall(self._num_calls, request, context, None, 0, at, list(row.prompt.messages))

    def _media_of(
        self, messages: Sequence[ChatMessage], context: AgentContext | None
    ) -> tuple[MediaData, MediaShape]:
        """Return the media of new messages, after those of the context that they continue."""
        given = [each for message in messages for each in message.media]
        reader = self.rules.media
        if not given or reader is None:
            return None, MediaShape()
        images, videos = _by_kind(given)
        self._check_images(len(images), context)
        try:
            before = None if context is None else context.row.media
            return reader.of(Observation(images=images, videos=videos), before)
        except (ValueError, OSError) as error:
            raise ApiError(f"a medium cannot be read: {error}", param="messages") from error

    def _check_images(self, added: int, context: AgentContext | None) -> None:
        before = [_num_images(one.row.media) for one in self._contexts]
        limits = {
            "max_images": (self._options.max_images, sum(before) + added),
            "worker.rollout.limit_images": (
                self.rules.max_prompt_images or None,
                added + (0 if context is None else _num_images(context.row.media)),
            ),
        }
        for name, (limit, count) in limits.items():
            if added and limit is not None and count > limit:
                raise ApiError(
                    f"{count} images, at most {limit} (`{name}`)", code="too_many_images", param="messages"
                )

    def _close(self, call: OpenCall) -> None:
        self._open.remove(call)
        call.context.is_busy = False

    def _answer(self, call: OpenCall, token_ids: Sequence[int], is_whole: bool) -> ChatMessage:
        rules, request = self.rules, call.request
        text, calls = rules.text_of(token_ids), []
        if is_whole and request.parses_calls:
            thought = THOUGHT * rules.starts_thought(call.token_ids)
            calls = rules.format.parse(without_thought(thought + text), request.tools)
            if any(one.problem for one in calls):
                calls = []  # the agent reads the text as it is
            if calls:
                text = text_before_calls(rules.format, thought + text).removeprefix(thought).rstrip()
        calls = calls[: request.max_calls]
        ids = [call_id(self._num_tool_calls + number) for number in range(len(calls))]
        self._num_tool_calls += len(calls)
        return assistant_message(text, calls, ids)

    def _give_rewards(self, contexts: Sequence[AgentContext], result: AgentResult) -> None:
        places = [(call.number, one, place) for one in contexts for place, call in enumerate(one.calls)]
        places.sort(key=lambda each: each[0])
        for (_, context, place), reward in zip(places, result.turn_rewards, strict=False):
            context.turns[place] = replace(context.turns[place], reward=reward)
        _, context, place = places[-1]
        last = context.turns[place]
        if result.reward is not None:
            last = replace(last, reward=result.reward + (last.reward or 0.0))
        context.turns[place] = replace(last, observations=(*last.observations, *_failures(result)))


def _context_full(message: str) -> ApiError:
    return ApiError(message, code="context_length_exceeded", param="messages")


def _called(context: AgentContext, new: Sequence[ChatMessage]) -> list[ToolCall]:
    """Return the calls of a context's last turn in the order of the messages that answer them."""
    made = context.turns[-1].calls
    answers = list(takewhile(lambda one: one.message["role"] == "tool", new))
    if not answers:
        return list(made)
    by_id = dict(zip(context.calls[-1].tool_call_ids, made, strict=True))
    in_order = [*made, *[UNNAMED] * len(answers)]
    return [by_id.get(one.answers or "", call) for one, call in zip(answers, in_order, strict=False)]


def _by_kind(media: Sequence[tuple[Kind, Reference]]) -> tuple[list[Reference], list[Reference]]:
    images, videos = ([ref for kind, ref in media if kind == wanted] for wanted in ("image", "video"))
    return images, videos


def _failures(result: AgentResult) -> tuple[Observation, ...]:
    return (Observation(result.text, failed=True, seconds=result.seconds),) if result.failed else ()


def _num_images(media: MediaData) -> int:
    return len((media or {}).get("images") or ())


def _plain_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    return tuple(one.message for one in messages)
