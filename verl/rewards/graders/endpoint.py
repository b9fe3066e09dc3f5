# SPDX-License-Identifier: Apache-2.0
"""Requests to a model behind an OpenAI-compatible server: bounded, with retries, each question once.

The server is a fixed URL, or one that the run serves: then the replicas at its addresses take turns, and a
request whose replica died goes to another, or waits until one has started again. `fields` of a scoring,
classifying or embedding model are more fields of the request, such as `use_activation=False` for the raw
number of a reward model. Imports no torch, so a reward process starts fast. Needs the package `openai`, a
dependency of vLLM.
"""

import asyncio
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import Room, write_whole

try:
    import openai
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"a judge needs the package {error.name}: pip install 'easy-verl[judge]'", name=error.name
    ) from error

NO_KEY = "none"  # the client insists on a key; servers that want none ignore it
SHOWN = 500  # characters of a server's message that an error shows
LOOK_S = 0.5  # between looks for a replica that answers
PASSING = (408, 409, 429)  # statuses that are retried, like those from 500
MAX_CACHE_BYTES = 1 << 30
BLOCK = 4096  # bytes that a short file takes on most file systems
ANSWER_FILE = re.compile(r"[0-9a-f]{30,126}")
Input = str | Sequence[Mapping[str, Any]]  # a text, or messages for the model's chat template

logger = get_logger(__name__)


class Addresses(Protocol):
    """Where the replicas of a model are that the run serves."""

    key: str  # that they ask for
    identity: str  # the model, for the names of cached answers
    patience_s: float  # that a request waits for a replica

    def living(self) -> list[str]:
        """Return the URLs of replicas that answer; raise a ConnectionError if there will be none."""
        ...


@dataclass(eq=False)
class Endpoint:
    """A model on a server. One object serves a process, in any number of event loops.

    Connection errors, timeouts and the statuses 408, 409, 429 and 5xx are retried with growing pauses, or
    after the server's `Retry-After`.
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
    addresses: Addresses | None = None  # of a model that the run serves, whose name `base_url` is then

    eases: ClassVar[str] = "`max_concurrency` or `worker.reward.max_concurrency`"  # lowered, a busy server

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if self.addresses is None and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(f"`base_url` must be like http://host:8000/v1, got {self.base_url!r}")
        for name, minimum in (("max_concurrency", 1), ("max_retries", 0), ("max_cache_bytes", 1)):
            if (value := getattr(self, name)) < minimum:
                raise ValueError(f"`{name}` must be at least {minimum}, got {value}")
        if not self.timeout_s > 0:
            raise ValueError(f"`timeout_s` must be above 0 seconds, got {self.timeout_s}")
        self.base_url = self.base_url.rstrip("/")
        self._api_key = _read_key(self.api_key_env) if self.addresses is None else self.addresses.key
        self._cache = None if self.cache_dir is None else AnswerCache(self.cache_dir, self.max_cache_bytes)
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}
        self._turns = itertools.count(os.getpid())  # processes begin with different replicas

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.model!r} at {self.base_url}"

    def name_of(self, question: list[Any]) -> str:
        """Return the name of an answer in the cache."""
        model = [self.base_url, self.model] if self.addresses is None else [self.addresses.identity]
        return digest([*model, *question])

    async def cached(self, question: list[Any], path: str, body: Mapping[str, Any]) -> str:
        """Return the text of an answer; with a cache, equal questions are sent once.

        Args:
            question: Names the answer, together with the model.
            path: Below `base_url`, or from the server's root with `..`.

        Raises:
            ValueError: The server refuses the request for good.
            TimeoutError: No attempt was answered in time.
            ConnectionError: The server cannot be reached.
            RuntimeError: It failed on every attempt, or answered without text.
        """
        session = self._session()
        if self._cache is None:
            return await self._request(session, path, body)
        key = self.name_of(question)
        async with session.questions.setdefault(key, asyncio.Lock()):
            answer = await asyncio.to_thread(self._cache.get, key)
            if answer is None:
                answer = await self._request(session, path, body)
                await asyncio.to_thread(self._cache.put, key, answer)
        return answer

    async def _request(self, session: "_Session", path: str, body: Mapping[str, Any]) -> str:
        async with session.slots:
            try:
                if self.addresses is None:
                    answer = await self._post(session, self.base_url, path, body)
                else:
                    answer = await self._post_to_any(session, self.addresses, path, body)
            except (openai.APIError, json.JSONDecodeError) as error:
                raise self._explain(error) from error
        return self.text_of(answer)

    async def _post(self, session: "_Session", url: str, path: str, body: Mapping[str, Any]) -> Any:
        if path.startswith("../"):
            url, path = url.removesuffix("/v1"), path.removeprefix("../")
        return await session.client.post(f"{url}/{path}", body=dict(body), cast_to=object)

    async def _post_to_any(
        self, session: "_Session", addresses: Addresses, path: str, body: Mapping[str, Any]
    ) -> Any:
        """Send a request to a replica that lives; one that died may be replaced meanwhile."""
        end = asyncio.get_running_loop().time() + addresses.patience_s
        failures, reason = 0, None
        while True:
            if urls := addresses.living():
                try:
                    return await self._post(session, urls[next(self._turns) % len(urls)], path, body)
                except (openai.APIStatusError, openai.APITimeoutError) as error:
                    failures += 1
                    if failures > self.max_retries or not _passes(error):
                        raise
                except openai.APIConnectionError as error:
                    reason = error
            if asyncio.get_running_loop().time() >= end:
                raise reason or ConnectionError(f"{self} has no replica after {addresses.patience_s:g} s")
            await asyncio.sleep(LOOK_S)

    def text_of(self, answer: Any) -> str:
        """Return an answer as text, or raise a RuntimeError if it is none."""
        return json.dumps(answer)

    def _session(self) -> "_Session":
        loop = asyncio.get_running_loop()
        for closed in [one for one in list(self._sessions) if one.is_closed()]:
            self._sessions.pop(closed, None)
        if loop not in self._sessions:
            client = openai.AsyncOpenAI(
                base_url=self.base_url if self.addresses is None else None,
                api_key=self._api_key,
                max_retries=self.max_retries if self.addresses is None else 0,
                timeout=self.timeout_s,
                # The client's own one tries to close itself in whatever loop runs when it is collected.
                http_client=openai.DefaultAsyncHttpxClient(),
            )
            slots = asyncio.Semaphore(self.max_concurrency)
            self._sessions[loop] = _Session(client, slots, WeakValueDictionary())
        return self._sessions[loop]

    def _explain(self, error: openai.APIError | json.JSONDecodeError) -> Exception:
        attempts = f"in up to {self.max_retries + 1} attempts"
        if isinstance(error, openai.APITimeoutError):
            what = f"{self} did not answer within `timeout_s` ({self.timeout_s:g} s) {attempts}"
            return TimeoutError(f"{what}: raise it, or lower {self.eases}")
        if isinstance(error, openai.APIConnectionError):
            what = f"{self} cannot be reached {attempts} ({error.__cause__ or error})"
            remedy = "start the server, or correct `base_url`"
            if self.addresses is not None:
                what = f"{self} cannot be reached for {self.addresses.patience_s:g} s"
                remedy = f"see the server's log, or raise `{self.base_url}.start_timeout_s`"
            return ConnectionError(f"{what}: {remedy}")
        if not isinstance(error, openai.APIStatusError):
            return RuntimeError(f"{self} answered unlike an OpenAI-compatible server: {error}")
        body = error.body.get("message", error.body) if isinstance(error.body, dict) else error.body
        reason = excerpt(str(body or error.response.reason_phrase))
        status = f"{self} answered status {error.status_code}"
        if _passes(error):
            remedy = f"see the server's log, raise `max_retries`, or lower {self.eases}"
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


def digest(question: list[Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def _passes(error: openai.APIError) -> bool:
    """Return whether a request may succeed when it is sent again."""
    if not isinstance(error, openai.APIStatusError):
        return True
    return error.status_code in PASSING or error.status_code >= 500


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


def excerpt(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


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


class Scorer(Endpoint):
    """A cross-encoder or reranker, which compares two texts."""

    async def score(self, query: str, document: str, **fields: Any) -> float:
        """Return how well a document fits a query."""
        body = {"text_1": query, "text_2": document, **fields}
        return float((await first_entry(self, "../score", body))["score"])


class Classifier(Endpoint):
    """A sequence classification model, such as a reward model, which has one class."""

    async def classify(self, text: Input, **fields: Any) -> list[float]:
        """Return the model's number for each of its classes."""
        entry = await first_entry(self, "../classify", _of(text) | fields)
        return list(map(float, entry["probs"]))


class Embedder(Endpoint):
    """A model that turns texts into vectors."""

    async def embed(self, text: Input, **fields: Any) -> list[float]:
        entry = await first_entry(self, "embeddings", _of(text) | fields)
        return list(map(float, entry["embedding"]))


async def first_entry(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model answers about the only text of a request."""
    answer = await endpoint.cached([path, dict(body)], path, {"model": endpoint.model, **body})
    return json.loads(answer)["data"][0]


def _of(text: Input) -> dict[str, Any]:
    return {"input": text} if isinstance(text, str) else {"messages": list(text)}
