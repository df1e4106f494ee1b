"""Who may ask: this machine, this page, with the token. Everything else is refused before a route is looked up."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGEST_BODY_BYTES = 256 * 1024
LONGEST_ADDRESS_BYTES = 4096
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware. Order: Host, Origin, size of address and body, token; then the headers on every answer.

    The token comes once in the address (`?token=`), which is answered by a cookie and the same address without it.
    port: the one we listen on; 0 accepts any port of this machine (tests).
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self.app, self.token, self.port = app, token, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse or pass on one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), None)
        if given is not None and self._right(given):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            where = _raw_path(scope) + (f"?{rest}" if rest else "")
            await _answer(send, 303, "", [(b"location", where.encode("latin-1")), (b"set-cookie", self._cookie())])
            return
        if not self._right(self._presented(headers)):
            await _answer(send, 403, "No valid token. Open the address that `gropius view` printed, token included.\n")
            return
        await self.app(scope, _limited(receive), _with_headers(send))

    @property
    def cookie_name(self) -> str:
        """One a port, so that two viewers do not put each other out."""
        return f"gropius_{self.port}"

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._own(host):
            return 421, "This viewer answers only to 127.0.0.1 and localhost.\n"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return 403, "Requests from another page are refused.\n"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "Requests from another page are refused.\n"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "Only GET, HEAD and POST.\n"
        if len(_raw_path(scope)) + len(scope.get("query_string", b"")) > LONGEST_ADDRESS_BYTES:
            return 414, "The address is too long.\n"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY_BYTES:
            return 413, f"A request may have {LARGEST_BODY_BYTES} bytes.\n"
        return None

    def _own(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        if self.port == 0:
            return name in LOOPBACK or host in LOOPBACK
        return name in LOOPBACK and port == str(self.port)

    def _presented(self, headers: dict[str, str]) -> str:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return bearer.strip()
        try:
            jar: SimpleCookie = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return ""
        return str(jar[self.cookie_name].value) if self.cookie_name in jar else ""

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _cookie(self) -> bytes:
        return f"{self.cookie_name}={self.token}; HttpOnly; SameSite=Strict; Path=/".encode()


class TooLarge(Exception):
    """A body that went on beyond the limit, whatever its header said."""


def _limited(receive: Receive) -> Receive:
    seen = 0

    async def wrapped() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > LARGEST_BODY_BYTES:
            raise TooLarge
        return message

    return wrapped


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            added = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in present]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return wrapped


def _raw_path(scope: Scope) -> str:
    raw = scope.get("raw_path") or scope["path"].encode("utf-8")
    path: str = raw.split(b"?")[0].decode("latin-1")
    return "/" + path.lstrip("/\\")


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = text.encode()
    fixed = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    out = _with_headers(send)
    await out({"type": "http.response.start", "status": status, "headers": [*fixed, *(headers or [])]})
    await out({"type": "http.response.body", "body": body})
