# SPDX-License-Identifier: Apache-2.0
"""A conversation between the policy and its tools: turns, observations, limits and termination.

Nothing here waits, runs a tool or reads a clock.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from verl.agents.contexts import Context, FinishedConversation, empty_response, joined_response
from verl.agents.interface import Message, Observation, StopReason, ToolCall, Turn
from verl.agents.media import join_media, join_shapes
from verl.agents.parsers.interface import THOUGHT, without_thought
from verl.agents.rendering import joined, user_message
from verl.agents.row import Piece, Row, SampledTurn
from verl.agents.rules import ConversationRules, Readable
from verl.agents.tools.tool_schema import call_problem
from verl.data.media.references import MediaData


class TurnRequest(NamedTuple):
    """The next turn to sample."""

    token_ids: list[int]  # one placeholder for each image or video
    media: MediaData  # of the prompt and all observations
    max_tokens: int
    number: int  # turns before it


class Conversation:
    """The state of one conversation, which `ConversationDriver` leads.

    `at` is in seconds since the conversation started, by a clock that all ranks of its engine share.
    """

    def __init__(self, rules: ConversationRules, row: Row) -> None:
        self.rules = rules
        self._contexts = [_begun(row, is_first=True)]
        self.stop_reason: StopReason | None = None
        self.is_waiting = False  # for observations
        self._is_masked = False
        self._failures: tuple[Observation, ...] = ()  # before the first turn
        self._turn_ended_at = 0.0
        self._refusals: list[Observation | None] = []  # of the last turn's calls; None for one that is made

    @property
    def is_done(self) -> bool:
        return self.stop_reason is not None

    @property
    def messages(self) -> Sequence[Message]:
        """Messages that the policy reads, with its turns."""
        return self._context.messages

    def request(self) -> TurnRequest:
        """Return the next turn to sample."""
        assert not self.is_done, "a conversation that has ended has no further turn"
        limit = self.rules.options.max_tokens_per_turn
        tokens = self._room if limit is None else min(self._room, limit)
        return TurnRequest(list(self._row.token_ids), self._row.media, tokens, self._num_turns)

    def add_turn(self, turn: SampledTurn, at: float = 0.0) -> list[ToolCall]:
        """Append a sampled turn and return the calls to make.

        Unless the conversation is waiting then, it has ended or asks for its next turn: calls that cannot be
        made are answered here.
        """
        assert not self.is_done and turn.token_ids, "a turn has tokens and follows a request"
        start, is_thinking = len(self._row.response), self.rules.starts_thought(self._row.token_ids)
        self._row.add_sampled(turn)
        self._turns.append(Turn(start, len(self._row.response)))  # before it is read, which may fail
        self._turn_ended_at = at
        text, is_whole = self.rules.text_of(turn.token_ids), turn.finish_reason != "length"
        self._context.messages.append({"role": "assistant", "content": text})
        said = without_thought(THOUGHT * is_thinking + text)
        calls = self.rules.format.parse(said, self.rules.schemas) if is_whole else []
        self._turns[-1] = replace(self._turns[-1], calls=tuple(calls))
        reason = self._end_after_turn(is_whole, bool(calls), at)
        if reason is not None:
            self.end(reason)
            return []
        self._refusals = [self._refusal(number, call) for number, call in enumerate(calls)]
        made = [call for call, refusal in zip(calls, self._refusals, strict=True) if refusal is None]
        self.is_waiting = bool(made) or (self.rules.has_environment and not calls)
        if not self.is_waiting:
            self.observe([], at)
        return made

    def observe(self, observations: Sequence[Observation], at: float = 0.0) -> Sequence[Observation]:
        """Append the answers to the calls that `add_turn` returned, in their order, if a limit allows it.

        An environment has one observation, whatever the number of calls. Returns the answers as the policy
        may read them: media that cannot be read make one fail.
        """
        self.is_waiting = False
        before = self._row.media
        answers = [self.rules.readable(answer, before) for answer in self._in_order(observations)]
        shown = tuple(answer.observation for answer in answers)
        rewards = [observation.reward for observation in shown if observation.reward is not None]
        self._turns[-1] = replace(
            self._turns[-1],
            observations=shown,
            seconds=at - self._turn_ended_at,
            reward=sum(rewards) if rewards else None,
        )
        reason = self._end_after_answers(shown, at) or self._show(answers)
        if reason is not None:
            self.end(reason)
        return shown

    def break_off(self, failure: Observation) -> None:
        """End after the last turn, masked: something failed that no rule foresees, or nothing could begin."""
        turns = next((context.turns for context in reversed(self._contexts) if context.turns), None)
        if turns is None:
            self._failures = (failure,)
        else:
            turns[-1] = replace(turns[-1], observations=(failure,))
        self.is_waiting = False
        self.end(StopReason.FAILED, is_masked=True)

    def end(self, reason: StopReason, is_masked: bool = False) -> None:
        """End the conversation; a masked one takes no part in training."""
        self.stop_reason, self._is_masked = reason, is_masked

    def finish(self) -> FinishedConversation:
        """Return the response and its trajectory."""
        assert self.stop_reason is not None, "the conversation has ended"
        first, *others = self._contexts
        contexts = [first, *(context for context in others if context.turns)]
        messages, reason = tuple(contexts[-1].messages), self.stop_reason
        if not first.turns:
            return empty_response(self.rules.tokenizer, messages, reason, self._failures)
        return joined_response(contexts, messages, reason, reason.finish_reason, is_masked=self._is_masked)

    @property
    def _context(self) -> Context:
        return self._contexts[-1]

    @property
    def _row(self) -> Row:
        return self._context.row

    @property
    def _turns(self) -> list[Turn]:
        return self._context.turns

    @property
    def _num_turns(self) -> int:
        return sum(len(context.turns) for context in self._contexts)

    @property
    def _room(self) -> int:
        return self.rules.max_tokens - sum(context.num_tokens for context in self._contexts)

    def _refusal(self, number: int, call: ToolCall) -> Observation | None:
        """Return the answer to a call that is not made."""
        limit = self.rules.options.max_parallel_calls
        if number >= limit:
            calls = "call" if limit == 1 else "calls"
            return Observation(f"Error: refused, because a turn may make {limit} {calls}.")
        problem = call_problem(self.rules.schemas, call)
        return None if problem is None else Observation(f"Error: {problem.removesuffix('.')}.")

    def _end_after_turn(self, is_whole: bool, has_calls: bool, at: float) -> StopReason | None:
        if not is_whole:
            return StopReason.LENGTH
        if self.rules.has_environment:
            return None  # each whole turn is a step, which may have a reward
        return self._end_by_limit(at) if has_calls else StopReason.STOP

    def _end_after_answers(self, answers: Sequence[Observation], at: float) -> StopReason | None:
        ending = [answer for answer in answers if answer.done]
        if ending:
            return StopReason.FAILED if any(answer.failed for answer in ending) else StopReason.DONE
        return self._end_by_limit(at)

    def _end_by_limit(self, at: float) -> StopReason | None:
        """Return the limit that the next turn, or the observation before it, would exceed."""
        options, turns = self.rules.options, self._num_turns
        if options.max_assistant_turns is not None and turns >= options.max_assistant_turns:
            return StopReason.TURNS
        if options.max_user_turns is not None and turns > options.max_user_turns:
            return StopReason.TURNS
        if self._room < 2:  # a token of an observation and one of the next turn
            return StopReason.LENGTH
        is_overdue = options.max_seconds is not None and at >= options.max_seconds
        return StopReason.SECONDS if is_overdue else None

    def _end_before(self, token_ids: Sequence[int], media: MediaData) -> StopReason | None:
        """Return the limit that tokens with these media would exceed."""
        read = [media, *(context.row.media for context in self._contexts)]
        new, *seen = (len((each or {}).get("images") or ()) for each in read)
        limit = self.rules.options.max_images
        if limit is not None and new and new + sum(seen) > limit:
            return StopReason.IMAGES
        return StopReason.LENGTH if len(token_ids) >= self._room else None

    def _show(self, answers: Sequence[Readable]) -> StopReason | None:
        """Have the policy read answers, or return the limit that they would exceed."""
        row = next((answer.row for answer in answers if answer.row is not None), None)
        if row is not None:
            reason = self._end_before(row.expanded_prompt, row.prompt.media)
            if reason is None:
                self._contexts.append(_begun(row))
            return reason
        messages = self._messages([answer.observation for answer in answers])
        piece = self._piece(answers, messages)
        reason = self._end_before(piece.expanded, piece.media)
        if reason is None:
            self._row.add_piece(piece)
            self._context.messages += messages
        return reason

    def _in_order(self, observations: Sequence[Observation]) -> list[Observation]:
        """Join the answers to calls that were made with the refusals of others."""
        if self.rules.has_environment:
            return [*observations, *(refusal for refusal in self._refusals if refusal is not None)]
        given = iter(observations)
        answers = [refusal or next(given) for refusal in self._refusals]
        assert next(given, None) is None, "each call has one observation"
        return answers

    def _piece(self, answers: Sequence[Readable], messages: Sequence[Message]) -> Piece:
        """Return the tokens that the policy reads after its turn."""
        calls, last_token = self._turns[-1].calls, self._row.token_ids[-1]
        tokens = self.rules.renderer.after_turn(last_token, calls, messages)
        media = reduce(join_media, (answer.media for answer in answers), None)
        return self._row.piece(tokens, media, join_shapes(*(answer.shape for answer in answers)))

    def _messages(self, observations: Sequence[Observation]) -> list[Message]:
        renderer, calls = self.rules.renderer, self._turns[-1].calls
        if not self.rules.has_environment:
            return renderer.messages(calls, observations)
        one = joined(observations)
        return renderer.messages(calls[:1], [one]) if calls else [user_message(one)]


def _begun(row: Row, is_first: bool = False) -> Context:
    messages = list(row.prompt.messages)
    return Context(row, messages, len(messages), is_first=is_first)
