# SPDX-License-Identifier: Apache-2.0
"""A small real HTTP server of files and of faulty responses."""

import time
from collections import Counter
from http.server import BaseHTTPRequestHandler

from tests.helpers.local_server import LocalServer


class FileServer(LocalServer):
    """Responds to `/NAME` with `answers[NAME]`: the bytes of a file, or a function of the handler.

    `asked` counts the requests for each name.
    """

    def __init__(self, **answers):
        self.answers = answers
        self.asked = Counter()
        super().__init__()

    def url(self, name, host="127.0.0.1"):
        return f"http://{host}:{self.port}/{name}"

    def _handler(server):  # noqa: N805 (the handler below has its own self)
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.removeprefix("/")
                server.asked[name] += 1
                answer = server.answers.get(name, status(404))
                try:
                    (answer if callable(answer) else content(answer))(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client disconnected

            def log_message(self, *_):
                pass

        return Handler


def content(body, **headers):
    """Send a file; the header `Content_Length` may be set to a wrong value."""

    def answer(handler):
        handler.send_response(200)
        for name, value in ({"Content_Length": len(body)} | headers).items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def status(code, **headers):
    """Send a status without a file."""

    def answer(handler):
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def in_turn(*answers):
    """Send the answers in turn, then repeat the last one."""
    left = list(answers)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


def for_ever(piece, pause_s=0.0, start=b"HTTP/1.1 200 OK\r\n\r\n"):
    """Send an endless response."""

    def answer(handler):
        handler.wfile.write(start)
        while True:
            handler.wfile.write(piece)
            time.sleep(pause_s)

    return answer


def silence(handler):
    """Do not respond."""
    time.sleep(30)
