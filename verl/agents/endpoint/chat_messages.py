# SPDX-License-Identifier: Apache-2.0
"""Messages of the chat completions API: conversion for chat templates, and comparison.

SDKs send back what they were answered with fields added or dropped, other ids, and None for an empty text.
Two messages are the same if their role, texts, media and calls are.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl.agents.interface import Message, Reference, ToolCall, unfit_part
from verl.data.media.references import DATA_URL, inline_bytes
from verl.models.families.interface import Kind

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # all but the last hold a `text`
MEDIA_PARTS: dict[str, Kind] = {"image_url": "image", "video_url": "video"}
LOCAL = "file://"

ReadUrl = Callable[[str], Reference] | None  # of a medium on the web; None: the model reads no media


class ApiError(Exception):
    """A call that is answered with an error, in OpenAI's form, so that SDKs raise their own exceptions.

    `param` is the field of the request that is refused.
    """

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatMessage:
    """A message of a request."""

    message: Message  # for the chat template; media are parts without payload
    media: tuple[tuple[Kind, Reference], ...] = ()  # in the order of their parts
    calls: tuple[ToolCall, ...] = ()  # of the assistant
    call_ids: tuple[str, ...] = ()
    answers: str | None = None  # the id of the call that a message of the role `tool` answers

    @property
    def text(self) -> str:
        content = self.message["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    @cached_property
    def digest(self) -> bytes:
        """Equal for messages that are the same."""
        content = self.message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts: list[Any] = [part.get("text", part["type"]) for part in parts]
        if self.message["role"] == "assistant":  # many programs strip what they were answered
            texts = [self.text.strip()]
        calls = [[call.name, call.arguments] for call in self.calls]
        whole = json.dumps([self.message["role"], texts, calls], sort_keys=True).encode()
        found = hashlib.blake2b(whole)
        for kind, ref in self.media:
            found.update(hashlib.blake2b(f"{kind}:{ref!r}".encode()).digest())
        return found.digest()


def read_messages(value: Any, read_url: ReadUrl) -> list[ChatMessage]:
    """Read the field `messages` of a request.

    Raises:
        ApiError: A message has another form.
    """
    if not isinstance(value, list) or not value:
        raise ApiError("`messages` must be a list of at least one message", param="messages")
    messages = [
        _read_message(message, f"messages[{number}]", read_url) for number, message in enumerate(value)
    ]
    if messages[-1].message["role"] == "assistant":
        raise ApiError(
            "the last message must not be the assistant's: turns are not continued", param="messages"
        )
    return messages


def assistant_message(text: str, calls: Sequence[ToolCall], call_ids: Sequence[str]) -> ChatMessage:
    """Return a turn of the policy as it is answered."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call, name in zip(calls, call_ids, strict=True)
        ]
    return ChatMessage(message, calls=tuple(calls), call_ids=tuple(call_ids))


def _read_message(value: Any, where: str, read_url: ReadUrl) -> ChatMessage:
    role = ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
    if role is None:
        raise ApiError(f"`{where}` must be an object whose `role` is one of {sorted(ROLES)}", param=where)
    content, media = _read_content(value.get("content"), f"{where}.content", read_url)
    if role == "assistant":
        calls, call_ids = _read_calls(value.get("tool_calls"), f"{where}.tool_calls")
        if media:
            raise ApiError(
                f"`{where}.content` is the assistant's and must be a text", param=f"{where}.content"
            )
        return assistant_message(content if isinstance(content, str) else "", calls, call_ids)
    if value.get("content") is None:
        raise ApiError(f"`{where}.content` must be a text or a list of parts", param=f"{where}.content")
    message: Message = {"role": role, "content": content}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    answers = value.get("tool_call_id") if role == "tool" else None
    if answers is not None:
        message["tool_call_id"] = answers = str(answers)
    return ChatMessage(message, tuple(media), answers=answers)


def _read_content(
    content: Any, where: str, read_url: ReadUrl
) -> tuple[str | list[dict[str, str]], list[tuple[Kind, Reference]]]:
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise ApiError(f"`{where}` must be a text or a list of parts", param=where)
    parts: list[dict[str, str]] = []
    media: list[tuple[Kind, Reference]] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = str(part.get("type")) if isinstance(part, dict) else None
        if kind in TEXT_PARTS and isinstance(
            text := part.get("refusal" if kind == "refusal" else "text"), str
        ):
            parts.append({"type": "text", "text": text})
        elif kind in MEDIA_PARTS:
            if read_url is None:
                raise ApiError(f"`{place}`: the model reads no images and videos", param=place)
            parts.append({"type": MEDIA_PARTS[kind]})
            media.append((MEDIA_PARTS[kind], _reference(part.get(kind), place, read_url)))
        else:
            expected = [*TEXT_PARTS, *MEDIA_PARTS]
            raise ApiError(f"`{place}` must be a part whose `type` is one of {expected}", param=place)
    if not media:
        return "".join(part["text"] for part in parts), []
    return parts, media


def _reference(value: Any, where: str, read_url: Callable[[str], Reference]) -> Reference:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise ApiError(f"`{where}` must have a `url`", param=where)
    try:
        if DATA_URL.match(url) is None:
            return {"path": url.removeprefix(LOCAL)} if url.startswith(LOCAL) else read_url(url)
        return {"bytes": inline_bytes(url)}
    except ValueError as error:
        raise ApiError(f"`{where}`: {error}", param=where) from error


def _read_calls(value: Any, where: str) -> tuple[list[ToolCall], list[str]]:
    if value is None:
        return [], []
    if not isinstance(value, list):
        raise ApiError(f"`{where}` must be a list of calls", param=where)
    calls, ids = [], []
    for number, entry in enumerate(value):
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"`{where}[{number}]` must have a `function` with a `name`", param=where)
        arguments = _arguments(function.get("arguments"), f"{where}[{number}]")
        calls.append(ToolCall(function["name"], arguments))
        ids.append(str(entry.get("id", "")))
    return calls, ids


def _arguments(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ApiError(f"`{where}.function.arguments` must be JSON: {error}", param=where) from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ApiError(f"`{where}.function.arguments` must be an object", param=where)
    if unfit := unfit_part(value):
        raise ApiError(f"`{where}.function.arguments` has {unfit}", param=where)
    return dict(value)
