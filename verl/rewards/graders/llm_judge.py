# SPDX-License-Identifier: Apache-2.0
"""A language model that judges responses, behind any OpenAI-compatible endpoint.

For reward functions that are `async def`, such as `examples/reward_function/llm_judge.py`. Imports no torch,
so a reward process starts fast. Needs the package `openai`, a dependency of vLLM.
"""

import asyncio
import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import Room, write_whole

try:
    import openai
    from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"a judge needs the package {error.name}: pip install 'easy-verl[judge]'", name=error.name
    ) from error

NO_KEY = "none"  # the client insists on a key; servers that want none ignore it
FEWER = "`max_concurrency` or `worker.reward.max_concurrency`"  # what eases a busy server
SHOWN = 500  # characters of a server's message that an error shows
MAX_CACHE_BYTES = 1 << 30
BLOCK = 4096  # bytes that a short file takes on most file systems
ANSWER_FILE = re.compile(r"[0-9a-f]{30,126}")

logger = get_logger(__name__)


@dataclass(eq=False)
class Judge:
    """Asks a model questions: a bounded number at a time, with retries, each different question once.

    Connection errors, timeouts and the statuses 408, 409, 429 and 5xx are retried with growing pauses, or
    after the server's `Retry-After`. One object serves a process, in any number of event loops.

    Example::

        judge = Judge("http://localhost:8000/v1", "Qwen/Qwen3-8B", cache_dir="/scratch/judge")
        await judge.ask([{"role": "user", "content": "Is 7 prime? Yes or no."}])  # "Yes"
    """

    base_url: str  # the endpoint up to `/chat/completions`; usually ends in `/v1`
    model: str  # its name on the server
    _: KW_ONLY
    api_key_env: str | None = None  # environment variable that holds the key; None sends none
    max_concurrency: int = 256  # concurrent requests, retries included
    max_retries: int = 6  # attempts after the first
    timeout_s: float = 120.0  # of each attempt
    # Folder of answers, shared by all processes that use it; None keeps none. Equal questions have the same
    # answer forever, at any temperature.
    cache_dir: str | Path | None = None
    max_cache_bytes: int = MAX_CACHE_BYTES  # the answers that have not been read for longest are removed
    temperature: float | None = 0.0  # None is the server's default
    max_tokens: int | None = 512  # of an answer; None is the server's default
    options: Mapping[str, Any] | None = None  # more fields of the request: `{"seed": 1}`

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"`base_url` must be like http://host:8000/v1, got {self.base_url!r}")
        for name, minimum in (("max_concurrency", 1), ("max_retries", 0), ("max_cache_bytes", 1)):
            if (value := getattr(self, name)) < minimum:
                raise ValueError(f"`{name}` must be at least {minimum}, got {value}")
        if not self.timeout_s > 0:
            raise ValueError(f"`timeout_s` must be above 0 seconds, got {self.timeout_s}")
        self.base_url = self.base_url.rstrip("/")
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        self.parameters = {key: value for key, value in own.items() if value is not None}
        self.parameters |= self.options or {}
        self._api_key = _read_key(self.api_key_env)
        self._cache = None if self.cache_dir is None else AnswerCache(self.cache_dir, self.max_cache_bytes)
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}

    def __str__(self) -> str:
        return f"judge {self.model!r} at {self.base_url}"

    async def ask(self, messages: Sequence[ChatCompletionMessageParam]) -> str:
        """Return the model's answer to a conversation. With a cache, equal questions are sent once.

        Raises:
            ValueError: The server refuses the request for good.
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
        question = [self.base_url, self.model, self.parameters, list(messages)]
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()

    def _session(self) -> "_Session":
        loop = asyncio.get_running_loop()
        for closed in [one for one in list(self._sessions) if one.is_closed()]:
            self._sessions.pop(closed, None)
        if loop not in self._sessions:
            client = openai.AsyncOpenAI(
                base_url=self.base_url,
                api_key=self._api_key,
                max_retries=self.max_retries,
                timeout=self.timeout_s,
                # The client's own one tries to close itself in whatever loop runs when it is collected.
                http_client=openai.DefaultAsyncHttpxClient(),
            )
            slots = asyncio.Semaphore(self.max_concurrency)
            self._sessions[loop] = _Session(client, slots, WeakValueDictionary())
        return self._sessions[loop]

    async def _request(self, session: "_Session", messages: Sequence[ChatCompletionMessageParam]) -> str:
        async with session.slots:
            try:
                completion = await session.client.chat.completions.create(
                    model=self.model, messages=list(messages), extra_body=self.parameters
                )
            except (openai.APIError, json.JSONDecodeError) as error:
                raise self._explain(error) from error
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            what = f"{self} answered something other than a chat completion: {_excerpt(str(completion))}"
            raise RuntimeError(f"{what}: check `base_url`, which usually ends in /v1")
        choice = completion.choices[0]
        if not choice.message.content:
            what = f"{self} answered without text (finish_reason {choice.finish_reason!r})"
            raise RuntimeError(f"{what}: a model that thinks needs a larger `max_tokens`")
        return choice.message.content

    def _explain(self, error: openai.APIError | json.JSONDecodeError) -> Exception:
        attempts = f"in up to {self.max_retries + 1} attempts"
        if isinstance(error, openai.APITimeoutError):
            what = f"{self} did not answer within `timeout_s` ({self.timeout_s:g} s) {attempts}"
            return TimeoutError(f"{what}: raise it, or lower {FEWER}")
        if isinstance(error, openai.APIConnectionError):
            what = f"{self} cannot be reached {attempts} ({error.__cause__ or error})"
            return ConnectionError(f"{what}: start the server, or correct `base_url`")
        if not isinstance(error, openai.APIStatusError):
            return RuntimeError(f"{self} answered unlike an OpenAI-compatible server: {error}")
        body = error.body.get("message", error.body) if isinstance(error.body, dict) else error.body
        reason = _excerpt(str(body or error.response.reason_phrase))
        status = f"{self} answered status {error.status_code}"
        if error.status_code in (408, 409, 429) or error.status_code >= 500:
            remedy = f"see the server's log, raise `max_retries`, or lower {FEWER}"
            return RuntimeError(f"{status} {attempts}: {reason}: {remedy}")
        return ValueError(f"{status}: {reason}: {self._remedy(error.status_code)}")

    def _remedy(self, status: int) -> str:
        if status in (401, 403) and self.api_key_env:
            return f"put a valid key into the environment variable {self.api_key_env}"
        if status in (401, 403):
            return "name the environment variable that holds the key in `api_key_env`"
        if status == 404:
            return f"`base_url` usually ends in /v1, and `model` must be listed at {self.base_url}/models"
        return "change the messages or the parameters so that the model accepts them"


class _Session(NamedTuple):
    """State of one event loop; none of it works in another loop."""

    client: openai.AsyncOpenAI
    slots: asyncio.Semaphore
    questions: "WeakValueDictionary[str, asyncio.Lock]"  # being asked


class AnswerCache:
    """A bounded directory of texts by hexadecimal digest, for any number of threads and processes."""

    def __init__(self, directory: str | Path, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._room = Room(self.directory, ANSWER_FILE, max_bytes, BLOCK)
        self._lock = threading.Lock()  # guards `_room`
        self._has_warned = False

    def get(self, name: str) -> str | None:
        try:
            with self._path(name).open("rb") as file:
                content = file.read()
                with suppress(PermissionError):  # another user's entry can be read, not renewed
                    os.utime(file.fileno())
        except FileNotFoundError:
            return None
        # A crash of the machine can leave an empty file.
        return content.decode("utf-8", "surrogatepass") if content else None

    def put(self, name: str, text: str) -> None:
        """Store a text that is not empty. A full disk is a warning: the judge will be asked again."""
        content = text.encode("utf-8", "surrogatepass")
        if not write_whole(self._path(name), content, self._make_room) and not self._has_warned:
            self._has_warned = True
            logger.warning("no room to store answers, which are asked for again: path=%s", self.directory)

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name[2:]

    def _make_room(self, coming: int) -> None:
        with self._lock:
            self._room.make(coming)


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


def _excerpt(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
