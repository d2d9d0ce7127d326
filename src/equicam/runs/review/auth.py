"""Access to the pages of a local server: a token once, then a cookie, and no request from another site.

The middleware wraps the whole application, so that no route can forget it. It refuses foreign host names, requests
without a session and forged posts from their headers alone, then large and slow bodies, all before any route runs, and
adds the security headers to every response. It never reads `request.url`, which holds whatever the Host header says.
"""

import asyncio
import ipaddress
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 16_384
MAX_BODY_SECONDS = 10
MAX_SESSIONS = 500
BROWSER_COOKIE = "equicam-browser"
BROWSER_COOKIE_SECONDS = 365 * 24 * 3600
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
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?")
_BROWSER = re.compile(r"[0-9A-Za-z_-]{43}")


@dataclass
class Session:
    """One browser that came with a token."""

    reviewer: str | None
    browser: str  # a random string that the browser keeps for a year
    suggested: str | None = None  # a name for a browser that has none yet
    fixed: bool = False  # a personal link has one name
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))


class Access:
    """The tokens of this start, the hosts it answers to, and the open sessions.

    With `personal` names there is a token for each of them and none for everybody. Otherwise a session begins as
    `reviewer`, or is offered the name `login`.
    """

    def __init__(
        self,
        *,
        port: int,
        hosts: Iterable[str] = (),
        exposed: bool = False,
        reviewer: str | None = None,
        login: str | None = None,
        personal: Iterable[str] = (),
        tls: bool = False,
        command: str = "review",
    ) -> None:
        self.tokens: dict[str | None, str] = {
            name: secrets.token_urlsafe(32) for name in (*personal,) or (None,)
        }
        # browsers share cookies between ports, so the name holds the port
        self.cookie, self.command = f"equicam-{command}-{port}", command
        self.port, self.exposed, self.tls = port, exposed, tls
        self.reviewer, self.login = reviewer, login
        self.hosts = {*LOOPBACK_HOSTS, *(host.lower() for host in hosts)}
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def allows_host(self, host: str) -> bool:
        """Whether a Host header names this server: its port and one of its hosts, or any IP address when exposed.

        Starlette's TrustedHostMiddleware ignores the port and cannot allow every IP address. DNS rebinding needs a
        host name, so an address is safe.
        """
        found = _HOST.fullmatch(host.lower())
        if found is None or int(found["port"] or (443 if self.tls else 80)) != self.port:
            return False
        return found["name"] in self.hosts or (self.exposed and _is_ip_address(found["name"]))

    def open_session(self, token: str, browser: str | None) -> tuple[str, Session] | None:
        """A new session and its cookie; None for a wrong token. `browser` is what this browser has kept."""
        matches = [
            name
            for name, one in self.tokens.items()
            if secrets.compare_digest(token.encode("utf-8", "replace"), one.encode())
        ]
        if not matches:
            return None
        if browser is None or not _BROWSER.fullmatch(browser):
            browser = secrets.token_urlsafe(32)
        name = matches[0]
        session = Session(name or self.reviewer, browser, self.login, fixed=name is not None)
        cookie = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[cookie] = session
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return cookie, session

    def session(self, request: Request) -> Session | None:
        """The session of a request's cookie."""
        cookie = _read_cookie(request, self.cookie)
        with self._lock:
            return self._sessions.get(cookie) if cookie else None


def _read_cookie(request: Request, name: str) -> str | None:
    try:
        found = SimpleCookie(request.headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return found.value if found else None


class AuthMiddleware:
    """Passes on requests with a session and answers all others.

    Posts are JSON of at most MAX_BODY_BYTES; those to the paths of `uploads` are bytes, at most so many.
    """

    def __init__(self, app: ASGIApp, access: Access, uploads: Mapping[str, int] | None = None) -> None:
        self.app, self.access, self.uploads = app, access, uploads or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, then run the application on it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send, request = _with_security_headers(send), Request(scope)
        session = self.access.session(request)
        refusal = self._refuse(request, session)
        body = b""
        if refusal is None and request.method == "POST":
            most = self.uploads.get(scope["path"], MAX_BODY_BYTES)
            try:
                async with asyncio.timeout(MAX_BODY_SECONDS):
                    body = await _read_body(receive, most)
            except TimeoutError:
                refusal = json_error(408, f"a post must arrive within {MAX_BODY_SECONDS} seconds")
            except ValueError:
                refusal = json_error(413, f"a post may have at most {most:,} bytes")
        if refusal is not None:
            if request.method not in ("GET", "HEAD"):
                refusal.headers["connection"] = "close"  # the rest of the body is not read
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["session"] = session
        await self.app(scope, _replay(body, receive), send)

    def _refuse(self, request: Request, session: Session | None) -> Response | None:
        """The response to a request that must not reach the application; the headers decide."""
        hosts, path = request.headers.getlist("host"), request.scope["path"]
        if len(hosts) != 1 or not self.access.allows_host(hosts[0]):
            return json_error(421, "this server answers only to the address it was started with")
        if request.method not in ("GET", "HEAD", "POST"):
            return json_error(405, "only GET, HEAD and POST")
        if request.method == "GET" and "token" in request.query_params:
            return self._redeem_token(request)
        if path.startswith("/static/") and request.method != "POST":
            return None
        if session is None:
            return self._unauthorised(path)
        if request.method != "POST":
            return None
        return _refuse_forged_post(request, session, upload=path in self.uploads)

    def _redeem_token(self, request: Request) -> Response:
        """Exchange the token for a cookie that scripts cannot read, and remove it from the address bar."""
        path = "/" + request.scope["path"].lstrip("/\\")
        opened = self.access.open_session(
            request.query_params["token"], _read_cookie(request, BROWSER_COOKIE)
        )
        if opened is None:
            return self._unauthorised(path)
        cookie, session = opened
        query = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
        response = RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), status_code=303)
        secure = self.access.tls
        # lax, because a link in a message is opened from another site
        response.set_cookie(
            BROWSER_COOKIE, session.browser, max_age=BROWSER_COOKIE_SECONDS, httponly=True, samesite="lax",
            path="/", secure=secure,
        )  # fmt: skip
        response.set_cookie(
            self.access.cookie, cookie, httponly=True, samesite="strict", path="/", secure=secure
        )
        return response

    def _unauthorised(self, path: str) -> Response:
        if path.startswith(("/api/", "/image/", "/export/")):
            return json_error(
                401, "the server was restarted, or this browser has not opened the address it printed"
            )
        command = self.access.command
        page = _UNAUTHORISED_PAGE.format(command=command, kept=_KEPT if command == "review" else "")
        return Response(page, 401, media_type="text/html; charset=utf-8")


def _refuse_forged_post(request: Request, session: Session, *, upload: bool) -> Response | None:
    """A post must come from the same origin and carry the session's secret."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return json_error(403, "this post came from another site")
    origin = request.headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != request.headers["host"].lower():
        return json_error(403, "this post came from another site")
    secret = request.headers.get(CSRF_HEADER, "")
    if not secrets.compare_digest(secret.encode(), session.csrf.encode()):
        return json_error(403, "this post does not carry the secret of the page; reload the page")
    kind, name = ("application/octet-stream", "bytes") if upload else ("application/json", "JSON")
    if request.headers.get("content-type", "").split(";")[0].strip() != kind:
        return json_error(415, f"a post must be {name}")
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


async def _read_body(receive: Receive, most: int) -> bytes:
    """The whole body; a ValueError if it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > most:
            raise ValueError("too large")
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
<title>equicam {command}</title><link rel="stylesheet" href="/static/review.css"></head>
<body class="message"><main><h1>Open the printed address</h1>
<p>This page opens with the address that <code>equicam {command}</code> printed when it started. The address holds a token
that is new at every start, so an old address or an old tab does not work.</p>
{kept}<p><a href="/">I have just opened that address: continue</a></p></main></body></html>
"""
_KEPT = """<p>Verdicts that could not be sent are kept in this browser and are sent when the page is open again.</p>
"""
