"""Access to the pages of a local server: a token once, then a cookie, and no request from another site.

The middleware wraps the whole application, so that no route can forget it. It refuses foreign host names, requests
without a session, forged posts and large ones from their headers alone, before any route runs, and adds the security
headers to every response. It never reads `request.url`, which holds whatever the Host header says.
"""

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from equicam.runs.report.facts import load_templates

TEMPLATES = Path(__file__).parent / "templates"
MAX_BODY_BYTES = 16_384
MAX_SESSIONS = 500
BROWSER_COOKIE = "equicam-browser"
BROWSER_COOKIE_SECONDS = 365 * 24 * 3600
BODY_HEADERS = {"content-length", "transfer-encoding"}
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
        port: int,
        *,
        command: str = "review",
        reviewer: str | None = None,
        login: str | None = None,
        personal: Iterable[str] = (),
    ) -> None:
        self.tokens: dict[str | None, str] = {
            name: secrets.token_urlsafe(32) for name in (*personal,) or (None,)
        }
        # browsers share cookies between ports, so the name holds the port
        self.cookie, self.command = f"equicam-{command}-{port}", command
        self.port, self.reviewer, self.login = port, reviewer, login
        # Starlette's TrustedHostMiddleware ignores the port
        self.hosts = {host if port == 80 else f"{host}:{port}" for host in LOOPBACK_HOSTS}
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def open_session(self, token: str, browser: str | None) -> tuple[str, Session] | None:
        """A new session and its cookie; None for a wrong token. `browser` is what this browser has kept."""
        given = token.encode("utf-8", "replace")
        matches = [name for name, one in self.tokens.items() if secrets.compare_digest(given, one.encode())]
        if not matches:
            return None
        if browser is None or not _BROWSER.fullmatch(browser):
            browser = secrets.token_urlsafe(32)
        name, cookie = matches[0], secrets.token_urlsafe(32)
        session = Session(name or self.reviewer, browser, self.login, fixed=name is not None)
        with self._lock:
            self._sessions[cookie] = session
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return cookie, session

    def session(self, request: Request) -> Session | None:
        """The session of a request's cookie."""
        with self._lock:
            return self._sessions.get(request.cookies.get(self.cookie, ""))


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
        if (refusal := self._refuse(request, session)) is not None:
            if BODY_HEADERS & {*request.headers}:
                refusal.headers["connection"] = "close"  # the body is not read
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["session"] = session
        with suppress(ClientDisconnect):
            await self.app(scope, receive, send)

    def _refuse(self, request: Request, session: Session | None) -> Response | None:
        """The response to a request that must not reach the application; the headers decide."""
        hosts, path = request.headers.getlist("host"), request.scope["path"]
        if len(hosts) != 1 or hosts[0].lower() not in self.access.hosts:
            return json_error(421, "this server answers only to the address it was started with")
        if request.method not in ("GET", "HEAD", "POST"):
            return json_error(405, "only GET, HEAD and POST")
        if request.method != "POST" and BODY_HEADERS & {*request.headers}:
            return json_error(413, "only a post may have a body")
        if request.method == "GET" and "token" in request.query_params:
            return self._redeem_token(request)
        if path.startswith("/static/") and request.method != "POST":
            return None
        if session is None:
            return self._unauthorised(path)
        if request.method != "POST":
            return None
        return _refuse_post(request, session, self.uploads.get(path))

    def _redeem_token(self, request: Request) -> Response:
        """Exchange the token for a cookie that scripts cannot read, and remove it from the address bar."""
        path, query = "/" + request.scope["path"].lstrip("/\\"), request.query_params
        opened = self.access.open_session(query["token"], request.cookies.get(BROWSER_COOKIE))
        if opened is None:
            return self._unauthorised(path)
        cookie, session = opened
        rest = urlencode([(name, value) for name, value in query.multi_items() if name != "token"])
        response = RedirectResponse(path + (f"?{rest}" if rest else ""), status_code=303)
        # lax, because a link in a message is opened from another site
        response.set_cookie(
            BROWSER_COOKIE, session.browser, max_age=BROWSER_COOKIE_SECONDS, httponly=True, samesite="lax"
        )
        response.set_cookie(self.access.cookie, cookie, httponly=True, samesite="strict")
        return response

    def _unauthorised(self, path: str) -> Response:
        if path.startswith(("/api/", "/image/", "/export/")):
            return json_error(
                401, "the server was restarted, or this browser has not opened the address it printed"
            )
        page = load_templates(TEMPLATES).get_template("unauthorised.html.j2")
        return HTMLResponse(page.render(command=self.access.command), 401)


def _refuse_post(request: Request, session: Session, upload: int | None) -> Response | None:
    """A post must come from the same origin, carry the session's secret, and say that it is small enough."""
    home, headers = f"http://{request.headers['host']}".lower(), request.headers
    same_site = headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
    if not same_site or headers.get("origin", home).lower() != home:
        return json_error(403, "this post came from another site")
    if not secrets.compare_digest(headers.get(CSRF_HEADER, "").encode(), session.csrf.encode()):
        return json_error(403, "this post does not carry the secret of the page; reload the page")
    kind, name = ("application/octet-stream", "bytes") if upload else ("application/json", "JSON")
    if headers.get("content-type", "").split(";")[0].strip() != kind:
        return json_error(415, f"a post must be {name}")
    length, most = headers.get("content-length", ""), upload or MAX_BODY_BYTES
    if "transfer-encoding" in headers or not re.fullmatch("[0-9]{1,12}", length) or int(length) > most:
        return json_error(413, f"a post may have at most {most:,} bytes")
    return None


def _with_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            # a response with an ETag may be stored and revalidated, all others must not be stored
            caching = "private, no-cache" if "etag" in headers else "no-store"
            for name, value in (SECURITY_HEADERS | {"cache-control": caching}).items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers


def json_error(status: int, message: str) -> Response:
    """An error as the page's scripts read it."""
    return JSONResponse({"error": message}, status)
