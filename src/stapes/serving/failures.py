"""What a client is told when something fails: one table from errors to statuses, in OpenAI's shape."""

from __future__ import annotations

import math
from typing import Any

from fastapi.responses import JSONResponse

from stapes.errors import StapesError

_KINDS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "origin_not_allowed"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "upload_too_slow"),
    413: ("invalid_request_error", "too_large"),
    415: ("invalid_request_error", "unsupported_audio"),
    422: ("invalid_request_error", "invalid_value"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("service_unavailable_error", "overloaded"),
    504: ("timeout_error", "timeout"),
}
"""For each status, OpenAI's ``type`` and the ``code`` that is said unless a better one is known."""


class ApiError(Exception):
    """An answer that is no result.

    param: the field of the request that is to blame. retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after
        self.type, usual = _KINDS.get(status, ("server_error", None))
        self.code = code or usual

    @classmethod
    def of(cls, error: StapesError) -> ApiError:
        """An error of ours, with the status that its class stands for."""
        return cls(error.http_status, str(error))

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Beside the body: when to come again, which scheme of keys."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers())
