"""Access to the review page: a token once, then a cookie, and no request from another site.

The middleware wraps the whole application, so that no route can forget it. It refuses foreign host names, large
bodies, requests without a session and forged posts before any route runs, and adds the security headers to every
response.
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

MAX_BODY_BYTES = 16_384
MAX_SESSIONS = 500
CSRF_HEADER = "x-equicam-csrf"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


@dataclass
class Session:
    """One browser that came with the token."""

    reviewer: str | None
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))


class Access:
    """The token of this start, the hosts it answers to, and the open sessions."""

    def __init__(
        self, *, port: int, hosts: Iterable[str] = (), exposed: bool = False, reviewer: str | None
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.cookie = (
            f"equicam-review-{port}"  # browsers share cookies between ports, so the name holds the port
        )
        self.port, self.exposed, self.reviewer = port, exposed, reviewer
        self.hosts = {*LOOPBACK_HOSTS, *(host.lower() for host in hosts)}
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def allows_host(self, host: str) -> bool:
        """Whether a Host header names this server: its port and one of its hosts, or any IP address when exposed.

        Starlette's TrustedHostMiddleware ignores the port and cannot allow every IP address. DNS rebinding needs a
        host name, so an address is safe.
        """
        name = host.lower().removesuffix(f":{self.port}")
        if name == host.lower() and self.port != 80:  # browsers leave out only port 80
            return False
        return name in self.hosts or (self.exposed and _is_ip_address(name))

    def open_session(self, token: str) -> str | None:
        """The cookie of a new session; None for a wrong token."""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        cookie = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[cookie] = Session(self.reviewer)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return cookie

    def session(self, request: Request) -> Session | None:
        """The session of a request's cookie."""
        try:
            cookie = SimpleCookie(request.headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return None
        with self._lock:
            return self._sessions.get(cookie.value) if cookie else None


class AuthMiddleware:
    """Passes on requests with a session and answers all others."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, then run the application on it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send = _with_security_headers(send)
        body = await _read_body(receive) if scope["method"] not in ("GET", "HEAD") else b""
        request = Request(scope)
        refusal = self._refuse(request, body)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["session"] = self.access.session(request)
        await self.app(scope, _replay(body or b"", receive), send)

    def _refuse(self, request: Request, body: bytes | None) -> Response | None:
        """The response to a request that must not reach the application."""
        if not self.access.allows_host(request.headers.get("host", "")):
            return json_error(421, "this server answers only to the address it was started with")
        if body is None:
            return json_error(413, f"a post may have at most {MAX_BODY_BYTES:,} bytes")
        if request.method not in ("GET", "HEAD", "POST"):
            return json_error(405, "only GET, HEAD and POST")
        if request.method == "GET" and "token" in request.query_params:
            return self._redeem_token(request)
        if request.url.path.startswith("/static/") and request.method != "POST":
            return None
        session = self.access.session(request)
        if session is None:
            return _unauthorised(request)
        return _refuse_forged_post(request, session) if request.method == "POST" else None

    def _redeem_token(self, request: Request) -> Response:
        """Exchange the token for a cookie that scripts cannot read, and remove it from the address bar."""
        cookie = self.access.open_session(request.query_params["token"])
        if cookie is None:
            return _unauthorised(request)
        query = [(k, v) for k, v in parse_qsl(request.url.query, keep_blank_values=True) if k != "token"]
        path = "/" + request.url.path.lstrip("/\\")
        response = RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), status_code=303)
        response.set_cookie(self.access.cookie, cookie, httponly=True, samesite="strict", path="/")
        return response


def _unauthorised(request: Request) -> Response:
    if request.url.path.startswith(("/api/", "/image/", "/export/")):
        return json_error(
            401, "the server was restarted, or this browser has not opened the address it printed"
        )
    return Response(_UNAUTHORISED_PAGE, 401, media_type="text/html; charset=utf-8")


def _refuse_forged_post(request: Request, session: Session) -> Response | None:
    """A post must come from the same origin and carry the session's secret."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return json_error(403, "this post came from another site")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        return json_error(403, "this post came from another site")
    secret = request.headers.get(CSRF_HEADER, "")
    if not secrets.compare_digest(secret.encode(), session.csrf.encode()):
        return json_error(403, "this post does not carry the secret of the page; reload the page")
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        return json_error(415, "a post must be JSON")
    return None


def _with_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            # a response with an ETag may be stored and revalidated, all others must not be stored
            caching = "private, no-cache" if b"etag" in present else "no-store"
            added = SECURITY_HEADERS | {"cache-control": caching}
            message["headers"] = [
                *message["headers"],
                *((k.encode(), v.encode()) for k, v in added.items() if k.encode() not in present),
            ]
        await send(message)

    return send_with_headers


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body, or None if it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive function that gives the body once more to the application."""
    sent = False

    async def receive_again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def json_error(status: int, message: str) -> Response:
    """An error as the page's scripts read it."""
    return JSONResponse({"error": message}, status)


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


_UNAUTHORISED_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>equicam review</title><link rel="stylesheet" href="/static/review.css"></head>
<body class="message"><main><h1>Open the printed address</h1>
<p>This page opens with the address that <code>equicam review</code> printed when it started. The address holds a token
that is new at every start, so an old address or an old tab does not work.</p>
<p>Verdicts that could not be sent are kept in this browser and are sent when the page is open again.</p>
<p><a href="/">I have just opened that address: continue</a></p></main></body></html>
"""
