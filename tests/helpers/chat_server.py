# SPDX-License-Identifier: Apache-2.0
"""A small real HTTP server with the chat protocol, for tests of unusual replies."""

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple

from PIL import Image

from tests.helpers.local_server import LocalServer


class Reply(NamedTuple):
    """Reply to one request."""

    text: str | None = "Score: 7"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: str | None = None  # instead of a completion
    content_type: str = "application/json"
    delay_s: float = 0.0


class ChatServer(LocalServer):
    """Sends `replies` in turn and then repeats the last one; `requests` has the received bodies.

    A reply may be a function of the body.
    """

    def __init__(self, *replies):
        self.replies = list(replies) or [Reply()]
        self.requests = []
        self.headers = []
        self.paths = []
        self.times = []
        self.running = 0
        self.most_running = 0
        self.lock = threading.Lock()
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def reply_to(self, path, body, headers):
        with self.lock:
            self.requests.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            self.times.append(time.monotonic())
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if callable(reply):
            reply = reply(body)
        time.sleep(reply.delay_s)
        with self.lock:
            self.running -= 1
        return reply

    def _handler(server):  # noqa: N805 (the handler below has its own self)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                reply = server.reply_to(self.path, json.loads(self.rfile.read(length)), self.headers)
                body = (reply.body if reply.body is not None else completion(reply)).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in (("Content-Type", reply.content_type), *reply.headers):
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client disconnected

            def log_message(self, *_):
                pass

        return Handler


def image_of(part):
    """The image in a part of a message."""
    assert part["type"] == "image_url"
    head, _, text = part["image_url"]["url"].partition(",")
    assert head == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(text, validate=True)))


def completion(reply):
    if reply.status != 200:
        return json.dumps({"error": {"message": reply.text, "type": "error", "code": reply.status}})
    message = {"role": "assistant", "content": reply.text}
    choice = {"index": 0, "message": message, "finish_reason": "length" if not reply.text else "stop"}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    )
