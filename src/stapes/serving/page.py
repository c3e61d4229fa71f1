"""The page at ``/``: static files of the package, served with a strict content security policy.

The files of the folder ``web`` are read once, when the router is made, and answered from memory by exact name: a
request never touches the file system, and no path can leave the folder. The page loads nothing from anywhere else, and
all its addresses are relative, so it works without a network and behind a reverse proxy under any path.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter, Request, Response

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "media-src 'self' blob:",  # recordings that the page itself holds
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked again every time and answered with 304 while unchanged: no browser mixes modules of two versions.
    "Cache-Control": "no-cache",
}

# Not left to the machine's table of types: a module with another type is not run.
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def page_router() -> APIRouter:
    """``GET`` and ``HEAD`` of ``/`` and of every file of the page. They need no key: what the page calls does."""
    router = APIRouter(include_in_schema=False)
    for entry in resources.files("stapes.serving").joinpath("web").iterdir():
        if entry.is_file():
            path = "/" if entry.name == "index.html" else f"/{entry.name}"
            router.add_api_route(path, _answer(entry.name, entry.read_bytes()), methods=["GET", "HEAD"])
    return router


def _answer(name: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    suffix = name[name.rfind(".") :]
    media_type = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}

    async def answer(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return answer
