# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint over a rollout engine, on 127.0.0.1; an API key names a conversation.

    with Endpoint(read_url, shows_tools=True) as endpoint:
        api_key = endpoint.open(key)                 # a conversation; agents call with it
        for call in endpoint.take(0.1):              # in the order of their arrival
            call.answer(reply)                       # or call.refuse(error)
        endpoint.close_conversation(key)             # its key is unknown from now on

Requests are read in the server's own threads. The thread that leads conversations takes them from a queue.
"""

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from verl.agents.endpoint.chat_messages import ApiError, ReadUrl
from verl.agents.endpoint.replies import Reply, completion, events
from verl.agents.endpoint.requests import ChatRequest, read_request
from verl.agents.interface import MAX_DEPTH, unfit_part
from verl.utils.processes.serving import taken
from verl.utils.rank_logger import get_logger

MAX_BODY = 256 << 20  # bytes; images are base64
MAX_BODY_DEPTH = 2 * MAX_DEPTH  # calls and schemas lie within messages and tools
BACKLOG = 4096
KEEP_ALIVE_S = 60
SHUTDOWN_S = 2
MODEL = "policy"  # the name of the only model; calls may use any

logger = get_logger(__name__, all_ranks=True)


class IncomingCall:
    """A call of an agent that waits for its answer; its client may have gone."""

    def __init__(self, key: Hashable, request: ChatRequest) -> None:
        self.key, self.request, self.is_gone = key, request, False  # is_gone: the client has disconnected
        self.future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        self._settle(self.future.set_result, reply)

    def refuse(self, error: ApiError) -> None:
        self._settle(self.future.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], value: Reply | ApiError) -> None:
        def settle_now() -> None:
            if not self.future.done():
                settle(value)

        with suppress(RuntimeError):  # the server has ended
            self.future.get_loop().call_soon_threadsafe(settle_now)


class Endpoint(AbstractContextManager["Endpoint"]):
    """The server and the calls that wait; see `read_request` for what it reads.

    `on_call` gets the conversation of a call before it can be taken, in a thread of the server.
    """

    def __init__(
        self, read_url: ReadUrl, *, shows_tools: bool, on_call: Callable[[Hashable], None] = lambda key: None
    ) -> None:
        self._on_call, self._read_url, self._shows_tools = on_call, read_url, shows_tools
        self._keys: dict[str, Hashable] = {}
        self._calls: SimpleQueue[IncomingCall] = SimpleQueue()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.base_url = "http://{}:{}/v1".format(*self._listening.getsockname())
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/{path:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
        ]
        answers = {ApiError: _refused, ClientDisconnect: _gone, Exception: _crashed}
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers=answers),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="agent-endpoint", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, key: Hashable) -> str:
        """Begin a conversation and return its API key."""
        api_key = f"sk-{secrets.token_urlsafe(24)}"
        self._keys[api_key] = key
        return api_key

    def close_conversation(self, key: Hashable) -> None:
        """Forget the API key of a conversation; its further calls are refused."""
        for api_key in [name for name, one in self._keys.items() if one == key]:
            del self._keys[api_key]

    def take(self, timeout_s: float) -> list[IncomingCall]:
        """Return the calls that came, in order; wait for one for at most `timeout_s`."""
        return taken(self._calls, timeout_s)

    def close(self) -> None:
        """End the server. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()

    # Everything below runs on the server's threads.

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listening]))

    async def _models(self, request: Request) -> Response:
        self._key_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl"}
        return _json({"object": "list", "data": [model]})

    async def _unknown(self, request: Request) -> Response:
        raise ApiError(f"there is no {request.method} {request.url.path}", status=404, code="not_found")

    async def _complete(self, request: Request) -> Response:
        key = self._key_of(request)
        asked = await run_in_threadpool(self._read, await _read_body(request))
        reply = await self._wait(request, IncomingCall(key, asked))
        if asked.streams:
            return StreamingResponse(events(asked, reply), media_type="text/event-stream")
        return _json(completion(asked, reply))

    def _key_of(self, request: Request) -> Hashable:
        scheme, _, api_key = request.headers.get("authorization", "").partition(" ")
        key = self._keys.get(api_key.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise ApiError(
                "the API key belongs to no conversation, or to one that has ended",
                status=401,
                code="invalid_api_key",
            )
        return key

    def _read(self, body: bytes) -> ChatRequest:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from error
        if unfit := unfit_part(value, MAX_BODY_DEPTH):
            raise ApiError(f"the body has {unfit}")
        return read_request(value, self._read_url, shows_tools=self._shows_tools)

    async def _wait(self, request: Request, call: IncomingCall) -> Reply:
        """Wait for the answer, and drop the call when its client disconnects."""
        self._on_call(call.key)
        self._calls.put(call)
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({gone, call.future}, return_when=asyncio.FIRST_COMPLETED)
            if not call.future.done():
                raise ClientDisconnect
            return call.future.result()
        finally:
            call.is_gone = not call.future.done()
            gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> bytes:
    too_large = ApiError(f"the body has over {MAX_BODY >> 20} MiB", status=413, code="request_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise too_large
    return bytes(body)


async def _refused(request: Request, error: ApiError) -> Response:
    return _json(error.body(), error.status)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _crashed(request: Request, error: Exception) -> Response:
    logger.error("a call of an agent failed in the endpoint", exc_info=error)
    failure = ApiError(f"the endpoint failed: {error!r}", status=500, code="internal_error")
    return await _refused(request, failure)


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    # in ASCII: what a policy writes may have lone surrogates, which have no bytes
    return Response(json.dumps(body, allow_nan=False), status, media_type="application/json")
