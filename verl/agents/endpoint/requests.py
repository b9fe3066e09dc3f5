# SPDX-License-Identifier: Apache-2.0
"""Fields of a chat completion that an agent may set; others are rejected by name.

A field is honoured, has no effect by design, or must have the only value that training can give it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl.agents.endpoint.chat_messages import ApiError, ChatMessage, ReadUrl, read_messages
from verl.utils.rank_logger import get_logger

HONOURED = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"),
    *("stream", "stream_options", "logprobs"),
)
# The policy is sampled with the options of the run: other probabilities would not be those of training.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", *SAMPLING),
)
# The values that a field may have in addition to null.
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
logger = get_logger(__name__, all_ranks=True)


@dataclass(frozen=True)
class ChatRequest:
    """A call of the policy."""

    messages: Sequence[ChatMessage]
    model: str = "policy"
    tools: Sequence[Mapping[str, Any]] = ()
    parses_calls: bool = True
    max_calls: int | None = None
    max_tokens: int | None = None
    streams: bool = False
    streams_usage: bool = False
    has_log_probs: bool = False


def read_request(body: Any, read_url: ReadUrl, *, shows_tools: bool) -> ChatRequest:
    """Read the body of a chat completion.

    Args:
        read_url: Returns a reference to a medium on the web, or raises a ValueError; None for a text model.
        shows_tools: The chat template does.

    Raises:
        ApiError: A field is refused; the error names it.
    """
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    _check_fields(body)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError("`tool_choice` must be auto or none: turns are sampled freely", param="tool_choice")
    tools = _read_tools(body.get("tools"))
    messages = read_messages(body.get("messages"), read_url)
    if not shows_tools and (tools or any(one.calls or one.answers for one in messages)):
        raise ApiError(
            "the chat template of the model shows no tools: set another one with"
            " `data.override_chat_template`, or pass none",
            param="tools",
        )
    usage = body.get("stream_options") or {}
    if not isinstance(usage, dict):
        raise ApiError("`stream_options` must be an object", param="stream_options")
    return ChatRequest(
        messages,
        model=str(body.get("model") or "policy"),
        tools=tools,
        parses_calls=bool(tools) and choice != "none",
        max_calls=None if _flag(body, "parallel_tool_calls", True) else 1,
        max_tokens=_max_tokens(body),
        streams=_flag(body, "stream", False),
        streams_usage=bool(usage.get("include_usage")),
        has_log_probs=_flag(body, "logprobs", False),
    )


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if value is None or name in HONOURED:
            continue
        if name in WITHOUT_EFFECT:
            if name in SAMPLING:
                _log_once(name)
        elif name not in FIXED:
            raise ApiError(f"`{name}` is not supported", code="unsupported_parameter", param=name)
        elif value not in FIXED[name]:
            allowed = " or ".join(map(repr, FIXED[name]))
            raise ApiError(
                f"`{name}` must be {allowed}, or left out: turns are sampled with the options of the run",
                code="unsupported_value",
                param=name,
            )


@cache
def _log_once(name: str) -> None:
    logger.info("an agent set `%s`, which has no effect: turns are sampled as the run's options say", name)


def _read_tools(value: Any) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ApiError("`tools` must be a list", param="tools")
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                f"`tools[{number}]` must have the type `function` and a `function` with a `name`",
                param=f"tools[{number}]",
            )
    return value


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"`{name}` must be true or false", param=name)
    return default if value is None else value


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ApiError(f"`{name}` must be a whole number of at least 1", param=name)
        limits.append(value)
    return min(limits, default=None)
