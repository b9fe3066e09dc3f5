# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's form, so that SDKs raise their own exceptions."""

from typing import Any


class ApiError(Exception):
    """A call that is answered with an error.

    Args:
        param: The field of the request that is refused.
    """

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def context_full(message: str) -> ApiError:
    """Return the error for a context that leaves no room for a turn."""
    return ApiError(message, code="context_length_exceeded", param="messages")
