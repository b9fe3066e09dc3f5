# SPDX-License-Identifier: Apache-2.0
r"""Render observations as the tokens that follow a turn of the policy.

    <|im_start|>assistant\n...</tool_call><|im_end|>\n<|im_start|>user\n...<|im_end|>\n<|im_start|>assistant\n
                                                    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

They are the difference of two renderings of a short conversation, with the observations and without, and are
tokenized alone. So a turn that was sampled is never rendered or tokenized again.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from verl.agents.interface import Message, Observation, ToolCall
from verl.data.chat_template import OTHER_TEMPLATE
from verl.models.families.interface import Kind
from verl.utils.rank_logger import get_logger

Template = Callable[..., str]  # as `verl.data.chat_template.ChatTemplate`
MARK = "zq17"  # a text that templates and names of tools do not contain
NAME = "an observation"  # in errors of templates
TOOL_ROLE = re.compile(r"""["']tool["']""")
RESPONSE, END_OF_RESPONSE = "<tool_response>\n", "\n</tool_response>"  # in a user's message
PART = re.compile(r"""\{["']type["']:""")  # of a list of parts that a template wrote as it is
UNNAMED = ToolCall("unknown", {})
OBSERVED: tuple[Kind, ...] = ("image", "video")  # what an `Observation` holds
MAX_KEPT = 256  # renderings; the policy may invent names of tools
SHOWN = 60  # characters of two texts from their first difference

logger = get_logger(__name__)


class Style(NamedTuple):
    """The messages in which a template shows observations."""

    role: str  # "tool", or "user" if the template knows no tools
    has_parts: bool  # their content is a list of parts, otherwise a text


class Following(NamedTuple):
    """The text after a sampled turn, from the special token that ends it."""

    text: str
    is_closed: bool  # the template ends a turn with that token whatever follows
    turn: str  # the end of the turn, from its last `MARK`


class ObservationRenderer:
    """Renders what follows a sampled turn, for one chat template with its tools.

    Args:
        template: Renders messages, with the schemas of the tools among its variables.
        source: The template's text.
        placeholders: The kinds of media by the token that stands for one; empty for a text model.
    """

    def __init__(
        self, tokenizer: Any, template: Template, source: str, placeholders: Mapping[int, Kind]
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"`worker.actor.model.tokenizer_path` ({tokenizer.name_or_path}) must have a fast tokenizer"
                " (`tokenizer.json`) for conversations with tools"
            )
        self.tokenizer, self.placeholders = tokenizer, placeholders
        self.template = template
        self._before: dict[tuple[Style, tuple[str, ...]], str] = {}  # renderings of a turn by names of calls
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = added | set(tokenizer.all_special_tokens)
        self._special_ids = set(tokenizer.convert_tokens_to_ids(sorted(special)))
        self._special = _any_of(special)
        # what is plain text spells none of these
        self.reserved = _any_of(special | set(tokenizer.convert_ids_to_tokens(list(placeholders))))
        self.style = self._find_style(bool(TOOL_ROLE.search(source)))
        # Some templates refuse a turn of several calls, whose answers then become one message.
        self._has_parallel_calls = self._problem_of(self.style, num_calls=2) is None

    def is_end(self, token: int) -> bool:
        """Return whether a sampled token ended the turn: a special one."""
        return token in self._special_ids

    def plain(self, text: str) -> str:
        """Return a text in which no special token is read: a space follows its first character."""
        text = text.encode(errors="replace").decode()  # a lone surrogate has no bytes
        return self.reserved.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    def plain_values(self, value: Any) -> Any:
        """Return a message, or a part of one, in whose texts and keys no special token is read."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self.plain_values(key): self.plain_values(each) for key, each in value.items()}
        return [self.plain_values(each) for each in value] if isinstance(value, list | tuple) else value

    def messages(self, calls: Sequence[ToolCall], observations: Sequence[Observation]) -> list[Message]:
        """Return the messages of the observations to a turn's calls."""
        return _messages(self.style, *self._shown(calls, observations))

    def after_turn(
        self, last_token: int, calls: Sequence[ToolCall], messages: Sequence[Message]
    ) -> list[int]:
        """Return the tokens after a turn that ended with `last_token`, up to where the next turn starts.

        Each image and video is one placeholder. The content of `messages` is a text or a list of parts;
        those of the role `tool` at the start answer `calls`, in their order.
        """
        following = self._after(self.style, *self.following(calls, messages))
        tokens = self._encode(following.text)
        leading = list(takewhile(self.is_end, tokens))
        if last_token in leading:
            return tokens[leading.index(last_token) + 1 :]
        # The policy ended its turn with another special token, or a stop text ended it.
        return tokens[int(following.is_closed and self.is_end(last_token)) :]

    def following(
        self, calls: Sequence[ToolCall], messages: Sequence[Message]
    ) -> tuple[Sequence[ToolCall], list[Message]]:
        """Return calls and messages in the form in which `after_turn` renders them."""
        answers = [self._answer(message) for message in takewhile(_is_answer, messages)]
        others = [self._in_style(message) for message in messages[len(answers) :]]
        if answers:
            calls = [*calls, *[UNNAMED] * len(answers)][: len(answers)]
        calls, answers = self._shown(calls, answers)
        shown = _messages(self.style, calls, answers) if answers else []
        return calls, [*shown, *others]

    def _shown(
        self, calls: Sequence[ToolCall], observations: Sequence[Observation]
    ) -> tuple[Sequence[ToolCall], Sequence[Observation]]:
        calls = [replace(call, name=self.plain(call.name)) for call in calls]
        if self._has_parallel_calls or len(calls) <= 1:
            return calls, observations
        if not observations:
            return calls[:1], observations
        return calls[:1], [joined(observations)]

    def _in_style(self, message: Message) -> Message:
        """Return a message with plain text, in the form that the template takes."""
        if _is_answer(message):  # to no call of the last turn
            return _messages(self.style, [UNNAMED], [self._answer(message)])[0]
        parts = [_text(self.plain(part["text"])) if "text" in part else part for part in _parts_of(message)]
        # Templates that take texts from tools may take the user's pictures nevertheless.
        has_media = any(part["type"] != "text" for part in parts)
        return {**self.plain_values(message), "content": parts if has_media else _content(parts, self.style)}

    def _answer(self, message: Message) -> Observation:
        parts = _parts_of(message)
        texts = [self.plain(part["text"]) for part in parts if "text" in part]
        images, videos = ([part for part in parts if part["type"] == kind] for kind in ("image", "video"))
        return Observation("\n".join(texts), images, videos)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _after(self, style: Style, calls: Sequence[ToolCall], messages: Sequence[Message]) -> Following:
        """Return what follows a turn with these calls; its last `MARK` ends what is not its form."""
        base = [_user("hello", style), _assistant(calls, style)]
        names = tuple(call.name for call in calls)
        before = self._before.get((style, names)) or self.template(base, False, NAME)
        if len(self._before) < MAX_KEPT:
            self._before[style, names] = before
        after = self.template([*base, *messages], True, NAME)
        marks = before.count(MARK)
        if marks == 0:
            raise ValueError("the assistant's text is not shown")
        end, seen = self._special.split(before.split(MARK)[-1]), after.split(MARK, marks)[-1]
        common = _shared_start(end, self._special.split(seen))
        while common and not common[-1].strip():
            common.pop()
        is_closed = bool(common) and self._special.fullmatch(common[-1]) is not None
        turn = "".join(common[:-1] if is_closed else common)
        text = seen[len(turn) :]
        if not self._special.match(text):
            raise ValueError(f"no special token ends the assistant's turn before {text[:SHOWN]!r}")
        return Following(text, is_closed, turn)

    @property
    def _shown_kinds(self) -> list[Kind]:
        """The kinds of media that the model reads in observations, which have no audio of their own."""
        return [kind for kind in OBSERVED if kind in self.placeholders.values()]

    def _find_style(self, knows_tools: bool) -> Style:
        has_media = bool(self._shown_kinds)
        styles = [Style("tool", has_media), Style("tool", False), Style("user", has_media)]
        reasons = []
        for style in dict.fromkeys(styles if knows_tools else styles[2:]):
            reason = self._problem_of(style)
            if reason is None:
                for other in reasons:
                    logger.warning("observations are messages of the role %r: %s", style.role, other)
                return style
            reasons.append(f"in messages of the role {style.role!r} {reason}")
        raise ValueError(
            f"the chat template cannot show observations: {'; '.join(reasons)}: {OTHER_TEMPLATE}"
        )

    def _problem_of(self, style: Style, num_calls: int = 1) -> str | None:
        """Return why a template cannot show observations so; None if it can."""
        kinds = self._shown_kinds
        seen = Observation("seen", images=["one"] * ("image" in kinds), videos=["one"] * ("video" in kinds))
        calls = [ToolCall("look", {})] * num_calls
        try:
            text = self._after(style, calls, _messages(style, calls, [seen] * num_calls)).text
        except ValueError as error:
            return f"it fails ({error})"
        if text.count(seen.text) != num_calls or PART.search(text):
            return f"it renders the text {seen.text!r} as {text!r}"
        shown = [self.placeholders[token] for token in self._encode(text) if token in self.placeholders]
        if sorted(shown) != sorted(kinds * num_calls):
            return f"it renders one of each of {kinds} with tokens of {sorted(shown)}"
        return None

    def check(self, max_parallel_calls: int = 1) -> None:
        """Compare each piece of a conversation with the template's rendering of the whole.

        With 0 for `max_parallel_calls` a conversation has no calls, and the user answers.

        Raises:
            ValueError: They differ, so the policy would read observations in another form than that of the
                template.
        """
        image = ["one"] * ("image" in self.placeholders.values())
        messages = [_user("hello", self.style)]
        for images, count in (([], min(1, max_parallel_calls)), (image, max_parallel_calls)):
            seen = Observation("seen", images=images)
            calls, observations = self._shown([ToolCall("look", {})] * count, [seen] * count)
            shown = _messages(self.style, calls, observations)
            if not calls:
                shown = [self._in_style(user_message(seen))]
            piece = self._after(self.style, calls, shown)
            messages.append(_assistant(calls, self.style))
            self._compare(self.template([*messages, *shown], True, NAME), piece)
            messages += shown

    def _compare(self, whole: str, piece: Following) -> None:
        expected = whole.split(MARK)[-1]
        assembled = piece.turn + piece.text
        if expected != assembled:
            at = len(_shared_start(expected, assembled))
            raise ValueError(
                "the chat template renders an observation differently in a longer conversation: expected"
                f" {expected[at : at + SHOWN]!r}, got {assembled[at : at + SHOWN]!r}: {OTHER_TEMPLATE}"
            )
        before = whole.removesuffix(piece.text)
        if self._encode(before) + self._encode(piece.text) != self._encode(whole):
            raise ValueError(
                f"the tokenizer splits {piece.text[:SHOWN]!r} differently after the assistant's turn:"
                " observations cannot be tokenized alone"
            )


def joined(observations: Sequence[Observation]) -> Observation:
    """Return one observation with the texts and media of several."""
    return Observation(
        "\n".join(observation.text for observation in observations),
        [image for observation in observations for image in observation.images],
        [video for observation in observations for video in observation.videos],
    )


def user_message(observation: Observation) -> Message:
    """Return an observation to a turn without calls, as the user's message."""
    parts = _parts(observation)
    has_media = any("text" not in part for part in parts)
    return {"role": "user", "content": parts if has_media else observation.text}


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _shared_start(first: Sequence[str], second: Sequence[str]) -> list[str]:
    pairs = zip(first, second, strict=False)  # one may be longer
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _user(text: str, style: Style) -> Message:
    return {"role": "user", "content": _content([_text(text)], style)}


def _assistant(calls: Sequence[ToolCall], style: Style) -> Message:
    """Return a turn whose form ends with the form of its last call, if the template writes any."""
    message: Message = {"role": "assistant", "content": _content([_text(MARK)], style)}
    if style.role == "tool" and calls:
        message["tool_calls"] = [
            {
                "id": call_id(number), "type": "function",
                "function": {"name": call.name or "unknown", "arguments": {"text": MARK}},
            }
            for number, call in enumerate(calls)
        ]  # fmt: skip
    return message


def call_id(number: int) -> str:
    """Return the id of a turn's call: nine letters and digits, as some templates demand."""
    return f"call{number:05}"


def _messages(style: Style, calls: Sequence[ToolCall], observations: Sequence[Observation]) -> list[Message]:
    if style.role == "tool":
        return [
            {
                "role": "tool", "name": call.name or "unknown", "tool_call_id": call_id(number),
                "content": _content(_parts(observation), style),
            }
            for number, (call, observation) in enumerate(zip(calls, observations, strict=True))
        ]  # fmt: skip
    parts = []
    for number, observation in enumerate(observations):
        start = "\n" + RESPONSE if number else RESPONSE
        parts += [_text(start), *_parts(observation), _text(END_OF_RESPONSE)]
    return [{"role": "user", "content": _content(parts, style)}]


def _is_answer(message: Message) -> bool:
    return message["role"] == "tool"


def _parts_of(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [_text(content)] if isinstance(content, str) else list(content)


def _parts(observation: Observation) -> list[dict[str, str]]:
    media = [{"type": "image"} for _ in observation.images] + [{"type": "video"} for _ in observation.videos]
    return [_text(observation.text)] * bool(observation.text or not media) + media


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _content(parts: list[dict[str, str]], style: Style) -> str | list[dict[str, str]]:
    return parts if style.has_parts else "".join(part.get("text", "") for part in parts)
