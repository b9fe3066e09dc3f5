# SPDX-License-Identifier: Apache-2.0
"""Prompts as people read them: without the tokens of chat templates, shortened to what tells them apart."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SPECIAL_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_(?:turn|image)>|</?s>|<[be]os>|\[/?INST\]"
)
KEPT_LENGTH = 20_000  # characters of a prompt that are compared with others
SHOWN_LENGTH = 240  # characters of a prompt in the table
MIN_COMMON = 40  # characters: a shorter common start stays
CONTEXT = 16  # characters of the common start before the difference


class PromptView(NamedTuple):
    """A prompt in the table."""

    text: str
    thumbnail: str | None  # file of the first image or frame in the media folder


def prompt_view(row: dict[str, Any]) -> PromptView:
    """Read a stored row with the columns `messages`, `prompt_start` and `media`."""
    text = conversation(row["messages"])
    if text is None:
        text = SPECIAL_TOKEN.sub(" ", row["prompt_start"] or "")
    files = (file for medium in row["media"] or [] if medium for file in medium["files"] or [])
    return PromptView(" ".join(text[:KEPT_LENGTH].split()), next(files, None))


def conversation(messages: str | None) -> str | None:
    """Return the texts of the messages, without the system's if there are others; None if unreadable."""
    try:
        parsed = json.loads(messages or "")
        turns = [(message["role"], _text_of(message["content"])) for message in parsed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    spoken = [text for role, text in turns if role != "system"]
    return "\n".join(spoken or [text for _, text in turns])


def distinct_starts(texts: Sequence[str]) -> list[str]:
    """Shorten each text to its start, or, if all begin alike, to a part near their first difference."""
    first, last = min(texts, default=""), max(texts, default="")  # what they share, all texts share
    pairs = enumerate(zip(first, last, strict=False))
    common = next((number for number, (one, other) in pairs if one != other), 0)
    if common < MIN_COMMON:
        return [text[:SHOWN_LENGTH] for text in texts]
    start = first.rfind(" ", 0, common - CONTEXT) + 1
    return [f"… {text[start:][:SHOWN_LENGTH]}" for text in texts]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if isinstance(part.get("text"), str))
