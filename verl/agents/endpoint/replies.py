# SPDX-License-Identifier: Apache-2.0
"""Chat completions built from the policy's turns, whole or as server-sent events."""

import json
import uuid
from collections.abc import Iterator
from time import time
from typing import Any, NamedTuple

from verl.agents.endpoint.chat_messages import ChatMessage
from verl.agents.endpoint.requests import ChatRequest

CHUNK = 400  # characters of text in an event
FINGERPRINT = "verl"


class Reply(NamedTuple):
    """A turn of the policy, as it is answered."""

    message: ChatMessage
    finish_reason: str  # stop, length or tool_calls
    prompt_tokens: int
    token_ids: list[int]
    log_probs: list[float]
    texts: list[str]  # of each token; empty unless log-probs are asked for


def completion(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    """Return the body of an answer."""
    calls = _calls(reply)
    content = reply.message.text or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    choice = {
        "index": 0, "message": message, "finish_reason": reply.finish_reason, "token_ids": reply.token_ids,
        "logprobs": _log_probs(reply) if request.has_log_probs else None,
    }  # fmt: skip
    return _head("chat.completion", request) | {"choices": [choice], "usage": _usage(reply)}


def events(request: ChatRequest, reply: Reply) -> Iterator[str]:
    """Yield the server-sent events of an answer, which was sampled as a whole."""
    head = _head("chat.completion.chunk", request)
    text, logprobs = reply.message.text, _log_probs(reply) if request.has_log_probs else None
    pieces = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in pieces]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_calls(reply))]
    for number, delta in enumerate(deltas):
        yield _event(head | {"choices": [_delta(delta, None, logprobs if number == 1 else None)]})
    last = _delta({}, reply.finish_reason, logprobs if len(deltas) == 1 else None)
    yield _event(head | {"choices": [last | {"token_ids": reply.token_ids}]})
    if request.streams_usage:
        yield _event(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _delta(delta: dict[str, Any], finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}


def _head(kind: str, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time()), "model": request.model,
        "system_fingerprint": FINGERPRINT,
    }  # fmt: skip


def _usage(reply: Reply) -> dict[str, int]:
    sampled = len(reply.token_ids)
    total = reply.prompt_tokens + sampled
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": sampled, "total_tokens": total}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id, "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call_id, call in zip(reply.message.call_ids, reply.message.calls, strict=True)
    ]  # fmt: skip


def _log_probs(reply: Reply) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(reply.texts, reply.log_probs, strict=True)
    ]
    return {"content": content, "refusal": None}
