# SPDX-License-Identifier: Apache-2.0
"""Middleware of a model server: every request must have the run's key.

vLLM's own check leaves out paths such as `/score` and `/sleep`. Imported by vLLM, from its argument
`--middleware`.
"""

import os
import secrets
from typing import Any

KEY_VARIABLE = "VERL_SERVER_KEY"
REFUSAL = b'{"error": {"message": "the key of the run is missing or wrong", "code": 401}}'


class KeyRequired:
    """An ASGI application in front of another."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_allowed(scope):
            await self.app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSAL})

    def _is_allowed(self, scope: dict[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self.expected)
