"""Who may talk to the page: a token once, a cookie after it, and nothing from another site.

Wraps the whole application, so that no route can forget it: host names that are not ours, large bodies, strangers and
forged posts are turned away before any route runs, and every answer leaves with the same headers.
"""

import ipaddress
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY = 16_384
MOST_SESSIONS = 500
CSRF = "x-equicam-csrf"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Session:
    """One browser that came with the token."""

    reviewer: str | None
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))


class Door:
    """The token of this start, the hosts it answers to, and who is in."""

    def __init__(
        self, *, port: int, hosts: Iterable[str] = (), exposed: bool = False, reviewer: str | None
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.cookie = f"equicam-review-{port}"  # cookies do not tell ports apart, names do
        self.port, self.exposed, self.reviewer = port, exposed, reviewer
        self.hosts = {*LOOPBACK, *(host.lower() for host in hosts)}
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, host: str) -> bool:
        """Is this Host header one of ours? A name that was made to point here is not; a bare address cannot be."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = (parts.hostname or "").lower(), parts.port or 80
        except ValueError:
            return False
        if port != self.port or parts.path or parts.query or parts.username is not None:
            return False
        return name in self.hosts or (self.exposed and _is_address(name))

    def enter(self, token: str) -> str | None:
        """A new session for who has the token."""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        key = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[key] = Session(self.reviewer)
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return key

    def session(self, request: Request) -> Session | None:
        """Who is asking, by the cookie."""
        try:
            jar = SimpleCookie(request.headers.get("cookie", ""))
        except CookieError:
            return None
        found = jar.get(self.cookie)
        with self._lock:
            return self._sessions.get(found.value) if found else None


class Guard:
    """The application behind a door."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through what may pass; answer the rest here."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = HEADERS | {"cache-control": "no-store"}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in more.items() if k.encode() not in given),
                ]
            await send(message)

        body = await _body(receive) if scope["method"] not in ("GET", "HEAD") else b""
        request = Request(scope)
        refusal = self._refusal(request, body)
        if refusal is not None:
            await refusal(scope, receive, dressed)
            return
        scope.setdefault("state", {})["session"] = self.door.session(request)
        await self.app(scope, _replayed(body or b"", receive), dressed)

    def _refusal(self, request: Request, body: bytes | None) -> Response | None:
        if not self.door.admits(request.headers.get("host", "")):
            return _no(421, "this page answers only to the address it was started with")
        if body is None:
            return _no(413, f"a post may have at most {MOST_BODY:,} bytes")
        if request.method not in ("GET", "HEAD", "POST"):
            return _no(405, "only GET, HEAD and POST")
        if request.method == "GET" and "token" in request.query_params:
            return self._entry(request)
        if request.url.path.startswith("/static/") and request.method != "POST":
            return None
        session = self.door.session(request)
        if session is None:
            return self._stranger(request)
        return _forged(request, session) if request.method == "POST" else None

    def _entry(self, request: Request) -> Response:
        """The token leaves the address bar, and comes back as a cookie scripts cannot read."""
        key = self.door.enter(request.query_params["token"])
        if key is None:
            return self._stranger(request)
        left = [(k, v) for k, v in parse_qsl(request.url.query, keep_blank_values=True) if k != "token"]
        path = "/" + request.url.path.lstrip("/\\")
        answer = RedirectResponse(path + (f"?{urlencode(left)}" if left else ""), status_code=303)
        answer.set_cookie(self.door.cookie, key, httponly=True, samesite="strict", path="/")
        return answer

    @staticmethod
    def _stranger(request: Request) -> Response:
        if request.url.path.startswith(("/api/", "/picture/", "/export/")):
            return _no(401, "this server was started anew, or you have not come by the address it printed")
        return Response(_CLOSED, 401, media_type="text/html; charset=utf-8")


def _forged(request: Request, session: Session) -> Response | None:
    """A post needs the page's own secret, and must not come from another site."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return _no(403, "this post came from another site")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        return _no(403, "this post came from another site")
    given = request.headers.get(CSRF, "")
    if not secrets.compare_digest(given.encode(), session.csrf.encode()):
        return _no(403, "this post does not carry the page's secret; reload the page")
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        return _no(415, "a post must be JSON")
    return None


async def _body(receive: Receive) -> bytes | None:
    """All of it, or None where it is too large."""
    found = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(found)
        found += message.get("body", b"")
        if len(found) > MOST_BODY:
            return None
        if not message.get("more_body"):
            return bytes(found)


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _no(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_CLOSED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>equicam review</title><link rel="stylesheet" href="/static/review.css"></head>
<body class="closed"><main><h1>Come in by the printed address</h1>
<p>This page opens with the address that <code>equicam review</code> printed when it started. It holds a token that is
new at every start, so an old address or an old tab does not open it.</p>
<p>Verdicts that could not be sent are kept in this browser and go out when the page is open again.</p>
<p><a href="/">I have just used that address: go on</a></p></main></body></html>
"""
