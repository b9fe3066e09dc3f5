# SPDX-License-Identifier: Apache-2.0
"""The viewer's command on its own process, and requests to it."""

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from verl.viewer.server import cookie_name

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "scripts/rollout_viewer.py")]


class Answer(NamedTuple):
    """What the server said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        """The body as JSON, by its rules: no nan."""
        return json.loads(self.body, parse_constant=lambda name: 1 / 0)


def request(address: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send one request with the path exactly as it is given, and the token of the address as a cookie."""
    token = token_of(address)
    headers = {"Cookie": f"{cookie_name(token)}={token}"} | headers
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    connection.close()
    return answer


def token_of(address: str) -> str:
    """The token that an address ends in."""
    return parse_qs(urlsplit(address).query)["token"][0]


@contextmanager
def viewer(*folders: Path) -> Iterator[str]:
    """Run the command over these folders; gives the address that it prints, and ends it by Ctrl-C."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, folders), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
