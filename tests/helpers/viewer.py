# SPDX-License-Identifier: Apache-2.0
"""Run the viewer's command in a separate process, and send requests to it."""

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from verl.viewer.server import cookie_name

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "scripts/rollout_viewer.py")]


class Answer(NamedTuple):
    """A response of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        """The body as strict JSON, without NaN."""
        return json.loads(self.body, parse_constant=lambda name: 1 / 0)


def request(
    address: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> Answer:
    """Send one request with the verbatim path, and the token of the address as a cookie.

    An underscore in the name of a header is sent as a hyphen.
    """
    token = token_of(address)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers = {"Cookie": f"{cookie_name(token)}={token}"} | headers
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    connection.close()
    return answer


def token_of(address: str) -> str:
    """Return the token at the end of an address."""
    return parse_qs(urlsplit(address).query)["token"][0]


@contextmanager
def viewer(*folders: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Run the command on these folders; yield the printed address, and end it with Ctrl-C."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, folders), "--port", "0", *options], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
