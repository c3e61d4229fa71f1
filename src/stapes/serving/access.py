"""Who may speak to the server: bearer keys, and the origins that a browser may come from.

Keys are kept as SHA-256 digests, in the file too, and compared in constant time against every one. Keys are meant to be
long random strings (`new_key` makes them); digests of guessable words could be guessed.

Browsers. A page of another site can make a visitor's browser send requests to a server on the visitor's own machine.
The browser then says where the page came from: an ``Origin`` other than ours is refused. Ours is the ``Host`` that was
asked for only where that is an address or ``localhost``: a name could be anybody's that was made to point here (DNS
rebinding). Sites, and names behind a proxy, are allowed one by one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stapes.errors import UsageError
from stapes.serving.failures import ApiError

SUBPROTOCOL = "openai-insecure-api-key."
"""Before a key among the subprotocols that a browser offers for a WebSocket; it can send no other header."""

_OPEN = {"/livez", "/readyz"}
_GUARDED = ("/v1/", "/metrics")


@dataclass(frozen=True)
class Client:
    """Who a request is from: ``label`` is the beginning of the key's digest, safe to log; ``local`` without keys."""

    label: str
    has_key: bool = False


def digest(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A key that nobody can guess."""
    return f"sk-stapes-{secrets.token_urlsafe(32)}"


class Keys:
    """The keys that are accepted, as digests. None at all: everybody may come."""

    def __init__(self, digests: Iterable[str] = ()) -> None:
        self._digests = sorted({each.lower() for each in digests})

    def __bool__(self) -> bool:
        return bool(self._digests)

    def client(self, key: str | None) -> Client:
        """Whose key it is. Raises ApiError 401."""
        if not self._digests:
            return Client("local")
        if key is None:
            raise ApiError(401, "No API key was given: send it as `Authorization: Bearer KEY`", code="missing_api_key")
        given = digest(key)
        # Every one is compared, so that the time tells nothing.
        if not any([hmac.compare_digest(given, known) for known in self._digests]):  # noqa: C419
            raise ApiError(401, "The API key is not one of this server's: check it")
        return Client(given[:8], has_key=True)

    @classmethod
    def read(cls, file: Path | None, plain: str | None = None) -> Keys:
        """Keys of a file, a digest (``sha256:…``) on each line, and plain ones separated by commas."""
        digests = [digest(key.strip()) for key in (plain or "").split(",") if key.strip()]
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{file}: the API keys could not be read ({error})") from error
            for number, line in enumerate(lines, 1):
                line = line.partition("#")[0].strip()
                if not line:
                    continue
                value = line.removeprefix("sha256:")
                if not line.startswith("sha256:") or len(value) != 64 or set(value.lower()) - set("0123456789abcdef"):
                    raise UsageError(
                        f"{file}, line {number}: keys are kept as sha256:DIGEST; `stapes serve --new-key` makes one"
                    )
                digests.append(value)
            if not digests:
                raise UsageError(f"{file} holds no API key: `stapes serve --new-key` makes one")
        return cls(digests)


class Origins:
    """The origins that a browser may come from, beside our own."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self.allowed = [each.rstrip("/").lower() for each in allowed]

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError 403 for a request that a page of another site made."""
        origin = headers.get("origin")
        if origin is None or "*" in self.allowed or origin.lower() in self.allowed:
            return
        host = headers.get("host", "").lower()
        if urlsplit(origin.lower()).netloc == host and _is_ours(host):
            return
        raise ApiError(403, "This server does not answer pages of that origin: allow it with --allow-origin")


def _is_ours(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Gatekeeper:
    """ASGI middleware: checks origin and key before anything of a request is read.

    Of HTTP requests and WebSockets alike; puts a `Client` into ``state.client``. A WebSocket is refused with the same
    statuses and error objects as HTTP, where the server can say so.
    """

    def __init__(self, app: ASGIApp, keys: Keys, origins: Origins) -> None:
        self._app, self._keys, self._origins = app, keys, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if scope["path"] not in _OPEN:
                self._origins.check(headers)
            guarded = scope["path"].startswith(_GUARDED) and scope.get("method") != "OPTIONS"
            scope.setdefault("state", {})["client"] = self._keys.client(key_of(headers)) if guarded else Client("local")
        except ApiError as error:
            await _refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, _hardened(send))


def key_of(headers: Headers) -> str | None:
    """The key of a request: a bearer token, or among the subprotocols of a WebSocket."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        if offered.strip().startswith(SUBPROTOCOL):
            return offered.strip().removeprefix(SUBPROTOCOL)
    return None


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await error.response()(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        response = error.response()
        headers = response.raw_headers
        await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": bytes(response.body)})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:120]})


def _hardened(send: Send) -> Send:
    """Answers are what they say they are, whatever a browser would guess."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("x-content-type-options", "nosniff")
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return sent
