# SPDX-License-Identifier: Apache-2.0
"""A language model that judges responses, behind any OpenAI-compatible endpoint.

For reward functions that are `async def`: `examples/reward_function/llm_judge.py` is one. Imports no torch,
so that a reward process starts fast. Needs the package `openai`, which vLLM brings along.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from verl.rewards.graders.answer_cache import MAX_BYTES, AnswerCache

try:
    import openai
    from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"a judge needs the package {error.name}: pip install 'verl[judge]'", name=error.name
    ) from error

NO_KEY = "none"  # the client insists on a key; servers that want none ignore it
FEWER = "`max_concurrency` or `worker.reward.max_concurrency`"  # what eases a busy server
SHOWN = 500  # characters of a server's message that an error shows


class Judge:
    """Asks a model questions: a bounded number at a time, with retries, each different question once.

    Connection errors, timeouts and the statuses 408, 409, 429 and 5xx are retried after 0.5, 1, 2, 4, 8, 8...
    seconds less up to a quarter, or after what the server's `Retry-After` says. With a cache, equal questions
    that are under way at the same time, as equal responses make them, are sent once.

    One object serves a process, in any number of event loops, also one after the other.

    Example::

        judge = Judge("http://localhost:8000/v1", "Qwen/Qwen3-8B", cache_dir="/scratch/judge")
        await judge.ask([{"role": "user", "content": "Is 7 prime? Yes or no."}])  # "Yes"

    Args:
        base_url: The endpoint up to `/chat/completions`; usually ends in `/v1`.
        model: Name of the model as the server calls it.
        api_key_env: Environment variable that holds the key; None sends none.
        max_concurrency: Requests under way at a time, retries included. A reward process has at most
            `worker.reward.max_concurrency` calls open, so that a larger number changes nothing there.
        max_retries: Further attempts after the first.
        timeout_s: Seconds that an attempt waits for the server. All attempts together are bounded by
            `worker.reward.timeout_s` where a reward function asks.
        cache_dir: Directory of answers, shared by all processes that name it; None keeps none. The same
            question then has the same answer for ever, at any temperature.
        max_cache_bytes: Bound of that directory; the answers that nobody read for longest go first.
        temperature: Of the judge's sampling; None leaves it to the server.
        max_tokens: The longest answer; None leaves it to the server.
        options: More fields of the request, as the server names them: `{"seed": 1}`,
            `{"chat_template_kwargs": {"enable_thinking": False}}`.

    Raises:
        ValueError: An argument is out of its range, or the environment variable is not set.
        OSError: The cache's directory cannot be made.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        max_concurrency: int = 256,
        max_retries: int = 6,
        timeout_s: float = 120.0,
        cache_dir: str | Path | None = None,
        max_cache_bytes: int = MAX_BYTES,
        temperature: float | None = 0.0,
        max_tokens: int | None = 512,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_url(base_url)
        _check_minimum("max_concurrency", max_concurrency, 1)
        _check_minimum("max_retries", max_retries, 0)
        _check_minimum("max_cache_bytes", max_cache_bytes, 1)
        if not timeout_s > 0:
            raise ValueError(f"`timeout_s` must be above 0 seconds, got {timeout_s}")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.api_key_env = api_key_env
        self.max_concurrency = max_concurrency
        self.max_retries = max_retries
        self.timeout_s = timeout_s
        own = {"temperature": temperature, "max_tokens": max_tokens}
        self.parameters = {key: value for key, value in own.items() if value is not None} | dict(
            options or {}
        )
        self._api_key = _read_key(api_key_env)
        self._cache = AnswerCache(cache_dir, max_cache_bytes) if cache_dir is not None else None
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}

    def __str__(self) -> str:
        return f"judge {self.model!r} at {self.base_url}"

    async def ask(self, messages: Sequence[ChatCompletionMessageParam]) -> str:
        """Return the model's answer to a conversation.

        Waits for the server or for one of `max_concurrency` places; released by the answer, the last failed
        attempt, or cancellation.

        Args:
            messages: `[{"role": "user", "content": "..."}]`; content may also be a list of texts and images.

        Raises:
            ValueError: The server refuses the request for good: wrong url, model, key, or a conversation that
                does not fit.
            TimeoutError: No attempt was answered in time.
            ConnectionError: The server cannot be reached.
            RuntimeError: It failed on every attempt, or answered without text.
        """
        session = self._session()
        if self._cache is None:
            return await self._request(session, messages)
        key = self.key(messages)
        async with session.questions.setdefault(key, asyncio.Lock()):
            answer = await asyncio.to_thread(self._cache.get, key)
            if answer is None:
                answer = await self._request(session, messages)
                await asyncio.to_thread(self._cache.put, key, answer)
        return answer

    def key(self, messages: Sequence[ChatCompletionMessageParam]) -> str:
        """The name of a conversation's answer in the cache: a digest of all that decides it."""
        question = [self.base_url, self.model, self.parameters, list(messages)]
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()

    def _session(self) -> "_Session":
        """The running loop's client; those of loops that have ended are dropped with their connections."""
        loop = asyncio.get_running_loop()
        for ended in [one for one in list(self._sessions) if one.is_closed()]:
            self._sessions.pop(ended, None)
        if loop not in self._sessions:
            client = openai.AsyncOpenAI(
                base_url=self.base_url,
                api_key=self._api_key,
                max_retries=self.max_retries,
                timeout=self.timeout_s,
                # The client's own one tries to close itself in whatever loop runs when it is collected.
                http_client=openai.DefaultAsyncHttpxClient(),
            )
            places = asyncio.Semaphore(self.max_concurrency)
            self._sessions[loop] = _Session(client, places, WeakValueDictionary())
        return self._sessions[loop]

    async def _request(self, session: "_Session", messages: Sequence[ChatCompletionMessageParam]) -> str:
        async with session.places:
            try:
                completion = await session.client.chat.completions.create(
                    model=self.model, messages=list(messages), extra_body=self.parameters
                )
            except (openai.APIError, json.JSONDecodeError) as error:
                raise self._explained(error) from error
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            raise RuntimeError(
                f"{self} answered something else than a chat completion: {_shown(str(completion))}:"
                " check `base_url`, which usually ends in /v1"
            )
        choice = completion.choices[0]
        if not choice.message.content:
            raise RuntimeError(
                f"{self} answered without text (finish_reason {choice.finish_reason!r}): a model that thinks"
                " needs a larger `max_tokens`"
            )
        return choice.message.content

    def _explained(self, error: openai.APIError | json.JSONDecodeError) -> Exception:
        attempts = f"in up to {self.max_retries + 1} attempts"
        if isinstance(error, openai.APITimeoutError):
            return TimeoutError(
                f"{self} did not answer within `timeout_s` ({self.timeout_s:g} s) {attempts}:"
                f" raise it, or lower {FEWER}"
            )
        if isinstance(error, openai.APIConnectionError):
            return ConnectionError(
                f"{self} cannot be reached {attempts} ({error.__cause__ or error}): start the server, or"
                " correct `base_url`"
            )
        if not isinstance(error, openai.APIStatusError):
            return RuntimeError(f"{self} answered what no OpenAI-compatible server does: {error}")
        what, why = f"{self} answered status {error.status_code}", _said(error)
        if error.status_code in (408, 409, 429) or error.status_code >= 500:
            return RuntimeError(
                f"{what} {attempts}: {why}: see the server's log, raise `max_retries`, or lower {FEWER}"
            )
        return ValueError(f"{what}: {why}: {self._remedy(error.status_code)}")

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            return (
                f"put a valid key into the environment variable {self.api_key_env}"
                if self.api_key_env
                else "name the environment variable that holds the key in `api_key_env`"
            )
        if status == 404:
            return (
                f"`base_url` usually ends in /v1, and `model` must be one that {self.base_url}/models lists"
            )
        return "change the messages or the parameters so that the model takes them"


class _Session(NamedTuple):
    """What one event loop needs: none of it works in another loop."""

    client: openai.AsyncOpenAI
    places: asyncio.Semaphore
    questions: "WeakValueDictionary[str, asyncio.Lock]"  # under way


def _check_url(base_url: str) -> None:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"`base_url` must be like http://host:8000/v1, got {base_url!r}")


def _check_minimum(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}")


def _read_key(api_key_env: str | None) -> str:
    if api_key_env is None:
        return NO_KEY
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ValueError(
            f"`api_key_env`: the environment variable {api_key_env} must hold the key, but is not set where"
            " the reward function runs: export it before the run starts"
        )
    return key


def _said(error: openai.APIStatusError) -> str:
    """What the server gives as its reason."""
    body = error.body
    reason = body.get("message", body) if isinstance(body, dict) else body
    return _shown(str(reason or error.response.reason_phrase))


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
