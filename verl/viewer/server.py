# SPDX-License-Identifier: Apache-2.0
"""Server of the viewer: requests from this machine, which read; only notes are written.

Prompts and responses are untrusted: they are sent only as JSON, images and videos, and the page puts texts
into text nodes. The content security policy of every response forbids foreign scripts and addresses. Requests
for other host names are rejected, so that no other site can make a browser send one. Other accounts of this
machine lack the token at the end of the printed address.
"""

import hashlib
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from verl.viewer import overview, queries
from verl.viewer.queries import FORMATS, RolloutQuery
from verl.viewer.rollout_store import FILE_PREFIXES, FOLDER, MEDIA, MEDIA_FILE, SERVED, is_inside
from verl.viewer.runs import MEDIA_TYPES, NOTES_BYTES, RunFolder, VideoFolders, checked_notes, write_notes

KEY_HEADER = "x-viewer-key"
OFF = "this viewer was started with --read-only"
LOOPBACK = "127.0.0.1"
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
TOKEN = "token"  # parameter in the printed address
SHUTDOWN_S = 3  # for pending responses
STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def add_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Add `HEADERS` to a response, including errors."""
    response = await call_next(request)
    response.headers.update(HEADERS)
    return response


async def check_host(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Refuse other host names, and what some parsers take for one, as in `localhost:80@evil.example`."""
    if not HOST.fullmatch(request.headers.get("host", "")):
        return PlainTextResponse(f"invalid host: use {LOOPBACK} or localhost", 400)
    return await call_next(request)


class TokenGate:
    """Requires the token: in the address on the first visit, in a cookie afterwards."""

    def __init__(self, token: str) -> None:
        self.token, self.cookie = token, cookie_name(token)

    async def __call__(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        if self._is_token(request.cookies.get(self.cookie, "")):
            return await call_next(request)
        if not self._is_token(request.query_params.get(TOKEN, "")):
            return PlainTextResponse("open the full address printed by the viewer, including its token", 403)
        # The token leaves the address bar. `//host` would be another site.
        answer = RedirectResponse("/" + request.url.path.lstrip("/"), 303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return answer

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.token.encode())


def cookie_name(token: str) -> str:
    # A host's cookies are sent to all its ports: a name derived from the token keeps viewers apart.
    return f"viewer_{hashlib.sha256(token.encode()).hexdigest()[:12]}"


def make_app(
    runs: Sequence[RunFolder], token: str, *, video_folders: Sequence[Path] = (), is_read_only: bool = False
) -> Starlette:
    """Build the pages and answers of runs; videos are played only from `video_folders`."""
    views = _Views(runs, VideoFolders(video_folders), WriteGuard(is_read_only=is_read_only))
    routes = [
        Route("/api/runs", views.runs),  # names, sizes, and a version that changes with the content
        Route("/api/runs/{run}/metrics", views.metrics),  # logged metrics as columns
        Route("/api/runs/{run}/notes", views.write_notes, methods=["POST"]),
        Route("/api/overview", views.overview),  # a line for each run: progress, results, notes
        Route("/api/configs", views.configs),  # options of `?run=0&run=1` that differ; `&all=yes`
        Route("/api/metrics.{format}", views.export_metrics),  # metrics of `?run=0&run=1`, to keep
        Route("/api/session", views.session),  # what the page needs to write notes
        Route("/api/runs/{run}/groups/{kind}/{step}/{group:path}", views.group),  # responses to a prompt
        Route("/api/runs/{run}/prompts/{kind}/{step}/{group:path}", views.prompt),  # the same at all steps
        Route("/api/neighbors/{run}/{kind}/{step}/{group:path}", views.neighbors),  # groups before and after
        Route("/api/rollouts", views.rollouts),  # a page of the table: `?run=0&score_min=0.5`
        Route("/api/distributions", views.distributions),  # histograms of the same rows
        Route("/api/export", views.export),  # the same rows as a file: `?format=csv&run=0`
        Route("/media/{run}/{file}", views.media),  # an image, a frame, or a video that was made
        Route("/videos/{run}/{kind}/{step}/{number}/{group:path}", views.video),  # a prompt's file, or audio
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    parts = (add_headers, check_host, TokenGate(token))
    return Starlette(
        routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=part) for part in parts]
    )


def loopback_socket(port: int) -> socket.socket:
    """Open a listening socket on 127.0.0.1; port 0 picks a free one."""
    return socket.create_server((LOOPBACK, port))


def new_token() -> str:
    return secrets.token_urlsafe(24)


def address_of(listening: socket.socket, token: str) -> str:
    return f"http://{LOOPBACK}:{listening.getsockname()[1]}/?{TOKEN}={token}"


def serve(app: Starlette, listening: socket.socket, until: BinaryIO | None = None) -> None:
    """Handle requests until Ctrl-C, or until `until`, read in a thread, reaches its end."""
    config = uvicorn.Config(
        app, log_level="warning", server_header=False, timeout_graceful_shutdown=SHUTDOWN_S
    )
    server = uvicorn.Server(config)
    if until is not None:

        def wait() -> None:
            until.read()
            server.should_exit = True

        threading.Thread(target=wait, daemon=True).start()
    server.run(sockets=[listening])


class WriteGuard:
    """Accepts JSON that this viewer's own page sends with the key that only it can read.

    The cookie alone is not enough: browsers send it for pages from other ports of this machine too.
    """

    def __init__(self, *, is_read_only: bool) -> None:
        self._key = None if is_read_only else secrets.token_urlsafe(24)

    def session(self) -> dict[str, str | None]:
        """Return what the page needs to write: a key, or the reason that there is none."""
        return {"key": self._key, "reason": OFF if self._key is None else None}

    def check(self, request: Request) -> None:
        """Raise the error of a request that may not write."""
        headers = request.headers
        if self._key is None:
            raise HTTPException(403, OFF)
        is_own_site = headers.get("sec-fetch-site", "same-origin") == "same-origin"
        if headers.get("origin") != f"http://{headers['host']}" or not is_own_site:
            raise HTTPException(403, "only the viewer's own page may change notes")
        if not secrets.compare_digest(headers.get(KEY_HEADER, "").encode(), self._key.encode()):
            raise HTTPException(403, "the page is older than this viewer: reload it")
        if headers.get("content-type") != "application/json":
            raise HTTPException(415, "notes are sent as application/json")


class _Views:
    """Results of the routes; Starlette runs plain functions in threads."""

    def __init__(self, runs: Sequence[RunFolder], videos: VideoFolders, guard: WriteGuard) -> None:
        self._runs, self._videos, self._guard = runs, videos, guard

    def runs(self, request: Request) -> Response:
        return JSONResponse([run.state() for run in self._runs])

    def metrics(self, request: Request) -> Response:
        return JSONResponse(self._run(request).metrics())

    def overview(self, request: Request) -> Response:
        return JSONResponse([overview.overview(run) for run in self._runs])

    def configs(self, request: Request) -> Response:
        with_equal = request.query_params.get("all") == "yes"
        return JSONResponse(overview.compare_configs(self._chosen(request), with_equal=with_equal))

    def export_metrics(self, request: Request) -> Response:
        name = _format(request.path_params["format"])
        return _download(queries.exported_metrics(self._chosen(request), name), "metrics", name)

    def session(self, request: Request) -> Response:
        return JSONResponse(self._guard.session())

    async def write_notes(self, request: Request) -> Response:
        self._guard.check(request)
        run = self._run(request)
        with _answered(400, ValueError):
            notes = checked_notes(await limited_body(request, NOTES_BYTES))
        with _answered(409, OSError):
            await run_in_threadpool(write_notes, run.folder, notes)
        return JSONResponse({})

    def group(self, request: Request) -> Response:
        return JSONResponse(self._videos.mark(self._group(request)))

    def video(self, request: Request) -> Response:
        media = self._group(request)[0]["media"] or []
        number = _path_number(request, "number", len(media))
        path = self._videos.find(media[number] and media[number]["source"])
        if path is None:
            raise HTTPException(404, "no such video in the given folders")
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix.lower()])

    def prompt(self, request: Request) -> Response:
        with _answered(404, KeyError):
            table = self._run(request).rollouts.same_prompt(*_path_group(request))
        return JSONResponse(queries.prompt_history(table))

    def neighbors(self, request: Request) -> Response:
        query, table = self._selected(request)
        group = (_path_number(request, "run", len(self._runs)), *_path_group(request))
        return JSONResponse(queries.neighbors(table, query, group))

    def rollouts(self, request: Request) -> Response:
        query, table = self._selected(request)
        answer = queries.page(table, query)
        answer["rows"] = queries.with_prompts(self._runs, answer["rows"])
        return JSONResponse(answer | {"choices": queries.choices(table)})

    def export(self, request: Request) -> Response:
        params = request.query_params.multi_items()
        name = _format(dict(params).get("format", ""))
        _, table = self._selected(request, [(key, text) for key, text in params if key != "format"])
        return _download(queries.exported(self._runs, table, name), "rollouts", name)

    def distributions(self, request: Request) -> Response:
        query, table = self._selected(request)
        return JSONResponse(queries.distributions(table, query.runs))

    def media(self, request: Request) -> Response:
        name = request.path_params["file"]
        folder = self._run(request).folder
        path = folder / FOLDER / MEDIA / name
        if not MEDIA_FILE.fullmatch(name) or not path.is_file() or not is_inside(path, folder):
            raise HTTPException(404, "no such image")
        return FileResponse(path, media_type=SERVED[path.suffix])

    def _group(self, request: Request) -> list[dict[str, Any]]:
        with _answered(404, KeyError):
            return self._run(request).rollouts.group(*_path_group(request))

    def _run(self, request: Request) -> RunFolder:
        return self._runs[_path_number(request, "run", len(self._runs))]

    def _chosen(self, request: Request) -> list[RunFolder]:
        """Return the runs of `?run=0&run=1`."""
        numbers = request.query_params.getlist("run")
        return [self._runs[_number_below(text, "run", len(self._runs))] for text in numbers]

    def _selected(
        self, request: Request, params: Sequence[tuple[str, str]] | None = None
    ) -> tuple[RolloutQuery, pa.Table]:
        given = request.query_params.multi_items() if params is None else params
        with _answered(400, ValueError):
            query = RolloutQuery.from_params(given, len(self._runs))
        return query, queries.select(self._runs, query)


@contextmanager
def _answered(status: int, kind: type[Exception]) -> Iterator[None]:
    """Answer an error of this kind with its text."""
    try:
        yield
    except kind as error:
        text = error.args[0] if isinstance(error, KeyError) else error  # its own text is quoted
        raise HTTPException(status, str(text)) from error


def _path_number(request: Request, name: str, end: int) -> int:
    return _number_below(request.path_params[name], name, end)


def _number_below(text: str, name: str, end: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) >= end:
        raise HTTPException(404, f"no such {name}")
    return int(text)


def _path_group(request: Request) -> tuple[str, int, str]:
    kind = request.path_params["kind"]
    if kind not in FILE_PREFIXES:
        raise HTTPException(404, "no such kind")
    return kind, _path_number(request, "step", 10**9), request.path_params["group"]


def _format(name: str) -> str:
    if name not in FORMATS:
        raise HTTPException(400, f"`format` must be one of {sorted(FORMATS)}, got {name[:40]!r}")
    return name


def _download(parts: Iterator[str], stem: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{stem}.{name}"'}
    return StreamingResponse(parts, media_type=FORMATS[name], headers=headers)


async def limited_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request; raise the error of one that is larger."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > max_bytes:
            raise HTTPException(413, f"at most {max_bytes} bytes")
    return bytes(content)
