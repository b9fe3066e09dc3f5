# SPDX-License-Identifier: Apache-2.0
"""Guard of requests that change a file.

The cookie alone is not enough: browsers send it with requests of pages from other ports of this machine too.
"""

import secrets

from starlette.exceptions import HTTPException
from starlette.requests import Request

KEY_HEADER = "x-viewer-key"
OFF = "this viewer was started with --read-only"


class WriteGuard:
    """Accepts JSON that this viewer's own page sends with the key that only it can read."""

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
        if headers.get("origin") != f"http://{headers['host']}":
            raise HTTPException(403, "only the viewer's own page may change notes")
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            raise HTTPException(403, "only the viewer's own page may change notes")
        if not secrets.compare_digest(headers.get(KEY_HEADER, "").encode(), self._key.encode()):
            raise HTTPException(403, "the page is older than this viewer: reload it")
        if headers.get("content-type") != "application/json":
            raise HTTPException(415, "notes are sent as application/json")


async def limited_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request; raise the error of one that is larger."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > max_bytes:
            raise HTTPException(413, f"at most {max_bytes} bytes")
    return bytes(content)
