# SPDX-License-Identifier: Apache-2.0
"""The policy as an agent's function sees it: address and key of its conversation, and a plain client."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class PolicyError(RuntimeError):
    """A call was refused; `code` is OpenAI's, as `context_length_exceeded`."""

    def __init__(self, message: str, status: int, code: str | None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Generated:
    """A turn of the policy."""

    message: dict[str, Any]  # to append to the messages of the next call
    finish_reason: str  # stop, length or tool_calls
    token_ids: list[int]

    @property
    def text(self) -> str:
        return self.message["content"] or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form."""
        return self.message.get("tool_calls", [])


@dataclass(frozen=True)
class Policy:
    """The policy of one conversation, for a function that is not async."""

    base_url: str
    api_key: str
    model: str

    def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Generated:
        """Sample a turn that follows the messages.

        Raises:
            PolicyError: The call was refused, because the conversation has no room for example.
        """
        body = {"model": self.model, "messages": list(messages), "tools": tools, "max_tokens": max_tokens}
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        url = f"{self.base_url}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        try:
            with direct.open(request) as response:
                choice = json.load(response)["choices"][0]
        except urllib.error.HTTPError as error:
            reason = json.load(error)["error"]
            raise PolicyError(reason["message"], error.code, reason["code"]) from None
        message = {name: value for name, value in choice["message"].items() if name != "refusal"}
        return Generated(message, choice["finish_reason"], choice["token_ids"])


class AsyncPolicy(Policy):
    """The policy of one conversation, for an async function."""

    async def generate(  # type: ignore[override]
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Generated:
        """Sample a turn that follows the messages; see `Policy.generate`."""
        return await asyncio.to_thread(super().generate, messages, tools, max_tokens=max_tokens)
