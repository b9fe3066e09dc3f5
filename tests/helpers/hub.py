# SPDX-License-Identifier: Apache-2.0
"""A local server with the part of the hub's interface that its client uploads with."""

import base64
import json
import re
from http.server import BaseHTTPRequestHandler

from tests.helpers.local_server import LocalServer

TOKEN = "hf_stand_in"
PREUPLOAD = re.compile(r"/api/models/(.+)/preupload/main")
COMMIT = re.compile(r"/api/models/(.+)/commit/main")


class Hub(LocalServer):
    """`repositories` has the files of each repository, and `private` the names of the private ones.

    Weights are stored as large files, all others in the commit, as on the hub. With `refuses`, a commit is
    answered with that HTTP status.
    """

    def __init__(self, refuses=None):
        self.repositories, self.private, self.refuses = {}, set(), refuses
        self._large = {}  # by their sha256
        super().__init__()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    @property
    def environment(self):
        """Variables of a process that uploads to this hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    def use_here(self, monkeypatch):
        """Let this process, whose client has read its variables, upload to this hub."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", self.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)

    @staticmethod
    def forget_token(monkeypatch, folder):
        """Leave this process without any token."""
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "no token"))

    def _answer(self, path, body):
        """Return the status and the JSON of an answer."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked.get("visibility") == "private" or asked.get("private"):
                self.private.add(name)
            known = name in self.repositories
            self.repositories.setdefault(name, {})
            return 409 if known else 200, {"url": f"{self.endpoint}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if PREUPLOAD.fullmatch(path):
            files = json.loads(body)["files"]
            modes = ["lfs" if one["path"].endswith(".safetensors") else "regular" for one in files]
            found = zip(files, modes, strict=True)
            return 200, {
                "files": [
                    {"path": one["path"], "uploadMode": mode, "shouldIgnore": False} for one, mode in found
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {
                "objects": [
                    one | {"actions": {"upload": {"href": f"{self.endpoint}/large/{one['oid']}"}}}
                    for one in objects
                ]
            }
        if match := COMMIT.fullmatch(path):
            if self.refuses is not None:
                return self.refuses, {"error": "out of storage"}
            return self._commit(match[1], body)
        return 404, {"error": path}

    def _commit(self, name, body):
        files = self.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._large[value["oid"]]
        return 200, {"commitUrl": f"{self.endpoint}/{name}/commit/1", "commitOid": "1" * 40}

    def _handler(hub):  # noqa: N805 (the handler below has its own self)
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                is_known = self.headers["Authorization"] == f"Bearer {TOKEN}"
                self._send(*(hub._answer(self.path, body) if is_known else (401, {"error": "Invalid token"})))

            def do_PUT(self):
                size = int(self.headers["Content-Length"])
                hub._large[self.path.removeprefix("/large/")] = self.rfile.read(size)
                self._send(200, {})

            def do_GET(self):
                self._send(404, {"error": self.path})

            def _send(self, status, answer):
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        return Handler
