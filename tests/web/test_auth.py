"""Nothing opens without the token, posts from other sites are refused, and every response has the security headers."""

import json
import shutil
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

import equicam
from equicam.live.app import make_app
from equicam.live.frames import FrameComputer
from equicam.runs.review.auth import Access
from equicam.runs.store import RunStore
from tests.web.conftest import HOME, PORT, Client, Server, events

KEY = "0" * 20
PATHS = {
    "review": "/ /reviewer /item/0 /api/queue /api/progress /api/item/0 /image/0/input /export/verdicts.csv",
    "open": "/ /api/setup /api/image/0 /api/frame /image/0/map /image/scale /image/input/0/0",
}
POSTS = {
    "review": {
        "/api/verdict": {"key": KEY, "verdict": "supports", "previous_event": 0, "mark": "12345678"},
        "/api/note": {"key": KEY, "text": "words", "mark": "12345678"},
        "/api/reviewer": {"name": "eve"},
    },
    "open": {"/api/image": {}},
}


@pytest.fixture(scope="module", params=["review", "open"])
def server(request, shared_run, tmp_path_factory):
    """One server of each page for all tests here: a refused request changes nothing."""
    if request.param == "review":
        return Server(RunStore(shutil.copytree(shared_run.folder, tmp_path_factory.mktemp("auth") / "run")))
    access = Access(PORT, command="open")
    app = make_app(FrameComputer(equicam.load("embedded")), access, method="equigrad-cam", views=6)
    return SimpleNamespace(access=access, app=app, client=lambda _: Client(access, app))


@pytest.fixture(scope="module")
def ana(server):
    return server.client("ana")


@pytest.fixture
def reviewer(run):
    return Server(run).client("ana")


def unauthorised(server, **options):
    """A client without a session."""
    return TestClient(server.app, base_url=HOME, follow_redirects=False, **options)


def test_without_the_token_nothing_opens(server):
    for path in PATHS[server.access.command].split():
        for token in (None, "", "wrong", "é", "x" * 5000):
            response = unauthorised(server).get(path, params=None if token is None else {"token": token})
            assert (response.status_code, "set-cookie" in response.headers) == (401, False)
            assert server.access.tokens[None] not in response.text
    assert f"equicam {server.access.command}" in unauthorised(server).get("/").text


def test_the_token_becomes_a_cookie_and_leaves_the_address(server):
    client, token = unauthorised(server), server.access.tokens[None]
    response = client.get(f"/item/abc?flag=blank&token={token}")
    assert (response.status_code, response.headers["location"]) == (303, "/item/abc?flag=blank")
    cookies = response.headers.get_list("set-cookie")
    parts = [{part.strip() for part in cookie.split(";")} for cookie in cookies]
    assert [{"HttpOnly", "Path=/"} <= some for some in parts] == [True, True]
    assert ["SameSite=strict" in some for some in parts] == [False, True]
    assert not any(token in cookie for cookie in cookies)
    assert client.get(PATHS[server.access.command].split()[1]).status_code == 200
    for slash in ("%2f", "%5c"):
        response = client.get(f"/{slash}evil.example/x?token={token}")
        assert response.headers["location"] == "/evil.example/x"  # it stays on this host


def test_every_start_has_its_own_token_and_rejects_old_cookies(run):
    first, second = Server(run), Server(run)
    assert first.access.tokens[None] != second.access.tokens[None]
    cookies = dict(first.client(None).http.cookies)
    assert unauthorised(second, cookies=cookies).get("/reviewer").status_code == 401


def test_loopback_names_are_allowed(server):
    for host in ("127.0.0.1", "localhost", "[::1]", "LOCALHOST"):
        headers = {"host": f"{host}:{PORT}"}
        assert unauthorised(server).get("/static/review.css", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-equicam-csrf": ""}, 403),
        ({"x-equicam-csrf": "guess"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT + 1}"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"host": f"evil.example:{PORT}"}, 421),
        ({"host": f"127.0.0.1:{PORT + 1}"}, 421),
    ],
)
def test_a_forged_post_is_refused(server, ana, headers, status):
    kind = "application/octet-stream" if server.access.command == "open" else "application/json"
    for path, body in POSTS[server.access.command].items():
        assert unauthorised(server).post(path, content=json.dumps(body)).status_code == 401
        assert ana.post(path, body, **{"content-type": kind} | headers).status_code == status
    if server.access.command == "review":
        assert events(server.run, "verdict", "note") == []
        assert "reviewing as</span> <bdi>ana" in ana.get("/").text


def test_a_proxy_sets_host_and_origin_to_the_address_that_the_page_was_started_with(reviewer):
    outside = {"host": "review.example", "origin": "https://review.example", "sec-fetch-site": "same-origin"}
    inside = outside | {"host": f"127.0.0.1:{PORT}", "origin": f"http://127.0.0.1:{PORT}"}
    assert reviewer.post("/api/reviewer", {"name": "bo"}, **outside).status_code == 421
    assert reviewer.post("/api/reviewer", {"name": "bo"}, **inside).status_code == 200


def test_every_session_has_its_own_secret(run):
    server = Server(run)
    reviewer, bo = server.client("ana"), server.client("bo")
    assert reviewer.csrf != bo.csrf
    assert reviewer.post("/api/reviewer", {"name": "x"}, **{"x-equicam-csrf": bo.csrf}).status_code == 403


def test_a_large_body_is_refused_even_in_chunks(reviewer):
    headers = {"x-equicam-csrf": reviewer.csrf, "content-type": "application/json"}
    for body in (b"x" * 20_000, (b"x" * 1000 for _ in range(30))):
        assert reviewer.http.post("/api/note", content=body, headers=headers).status_code == 413
    assert reviewer.http.request("GET", "/", content=b"x").status_code == 413
    unsaid = headers | {"transfer-encoding": "chunked", "content-length": "5"}
    assert reviewer.http.post("/api/note", content=b"x" * 5, headers=unsaid).status_code == 413


def test_other_methods_are_refused(ana):
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ana.http.request(method, "/api/verdict").status_code == 405


def test_every_response_has_the_security_headers(server, ana):
    exact = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
    for path in (*PATHS[server.access.command].split(), "/nowhere", "/static/review.js", "/static/none"):
        for response in (ana.get(path), unauthorised(server).get(path)):
            headers = response.headers
            assert {name: headers[name] for name in exact} == exact
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert "no-" in headers["cache-control"]
            assert "access-control-allow-origin" not in headers


def test_pages_hold_no_inline_script_style_or_foreign_address(reviewer):
    for path in ("/", "/reviewer", f"/item/{reviewer.list_keys()[0]}", "/item/0"):
        page = reviewer.page(path)
        assert all(a.get("src", "").startswith("/static/") for a in page.every("script"))
        assert not page.every("style")
        for tag, attributes in page.elements:
            assert not {a for a in attributes if a == "style" or a.startswith("on")}, tag
            for name in ("src", "href", "action", "data-src"):
                assert not attributes.get(name) or attributes[name].startswith(("/", "#"))


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/live/../app.py", "/static/live/%2e%2e/app.py",
        "/static/live/../../review/app.py", "/image/../../manifest.json", "/image/..%2f..%2fmanifest/input",
        "/image/manifest.json/input", "/item/..%2f..%2f..%2fetc%2fpasswd", "/export/verdicts...%2fevents.sqlite", "/events.sqlite",
        "/image/{key}/..%2finput", "/image/{key}/view-999", "/image/{key}/thumb--1", "/image/{key}/scale", "/image/scale/input",
    ],
)  # fmt: skip
def test_no_path_reaches_a_file(server, ana, path):
    key = ana.list_keys()[0] if server.access.command == "review" else KEY
    response = ana.get(path.format(key=key))
    assert response.status_code == 404
    assert "root:" not in response.text
    assert len(response.content) < 3000
