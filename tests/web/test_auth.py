"""Nothing opens without the token, posts from other sites are refused, and every response has the security headers."""

import shutil

import pytest
from starlette.testclient import TestClient

from equicam.runs.log import Log
from equicam.runs.store import RunStore
from tests.web.conftest import HOME, PORT, Server

PATHS = [
    "/",
    "/reviewer",
    "/item/0",
    "/api/queue",
    "/api/progress",
    "/api/item/0",
    "/image/0/input",
    "/export/verdicts.csv",
]


@pytest.fixture(scope="module")
def server(shared_run, tmp_path_factory):
    """One server for all tests here: a refused request changes nothing."""
    return Server(RunStore(shutil.copytree(shared_run.folder, tmp_path_factory.mktemp("auth") / "run")))


@pytest.fixture(scope="module")
def ana(server):
    return server.client("ana")


def unauthorised(server, **options):
    """A client without a session."""
    return TestClient(server.app, base_url=options.pop("base_url", HOME), follow_redirects=False, **options)


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_opens(server, path):
    response = unauthorised(server).get(path)
    assert response.status_code == 401
    assert server.access.tokens[None] not in response.text


@pytest.mark.parametrize("token", ["", "wrong", "é", "x" * 5000])
def test_a_wrong_token_opens_nothing(server, token):
    response = unauthorised(server).get("/", params={"token": token})
    assert response.status_code == 401
    assert "set-cookie" not in response.headers


def test_the_token_becomes_a_cookie_and_leaves_the_address(server):
    client = unauthorised(server)
    response = client.get(f"/item/abc?flag=blank&token={server.access.tokens[None]}")
    assert (response.status_code, response.headers["location"]) == (303, "/item/abc?flag=blank")
    cookie = response.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert server.access.tokens[None] not in cookie
    assert client.get("/reviewer").status_code == 200


def test_the_redirect_stays_on_this_host(server):
    response = unauthorised(server).get(f"//evil.example/x?token={server.access.tokens[None]}")
    assert response.headers["location"].startswith("/")
    assert not response.headers["location"].startswith("//")


def test_every_start_has_its_own_token_and_rejects_old_cookies(run):
    first, second = Server(run), Server(run)
    assert first.access.tokens[None] != second.access.tokens[None]
    client = unauthorised(first)
    client.get(f"/?token={first.access.tokens[None]}")
    other = unauthorised(second, cookies=dict(client.cookies))
    assert other.get("/reviewer").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{PORT}", "", f"a@127.0.0.1:{PORT}", f"127.0.0.1:{PORT}/x", "[::1"]
)  # fmt: skip
def test_other_host_names_are_refused(server, host):
    response = unauthorised(server).get(f"/?token={server.access.tokens[None]}", headers={"host": host})
    assert response.status_code == 421


@pytest.mark.parametrize(
    "host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}"]
)
def test_loopback_names_are_allowed(server, host):
    assert unauthorised(server).get("/static/review.css", headers={"host": host}).status_code == 200


def test_an_exposed_server_allows_ip_addresses_and_no_other_names(run):
    server = Server(run, exposed=True)
    for host, status in (
        (f"192.0.2.7:{PORT}", 200),
        (f"[2001:db8::1]:{PORT}", 200),
        (f"evil.example:{PORT}", 421),
    ):
        assert unauthorised(server).get("/static/review.css", headers={"host": host}).status_code == status
    assert (
        unauthorised(Server(run)).get("/static/review.css", headers={"host": f"192.0.2.7:{PORT}"}).status_code
        == 421
    )


POSTS = {
    "/api/verdict": {"key": "0" * 20, "verdict": "supports", "previous_event": 0, "mark": "12345678"},
    "/api/note": {"key": "0" * 20, "text": "words", "mark": "12345678"},
    "/api/reviewer": {"name": "eve"},
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {"x-equicam-csrf": ""},
        {"x-equicam-csrf": "guess"},
        {"origin": "http://evil.example"},
        {"origin": f"http://127.0.0.1:{PORT + 1}"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_forged_post_is_refused(server, ana, path, headers):
    response = ana.post(path, POSTS[path], **headers)
    assert response.status_code == 403
    assert not any(e.kind in ("verdict", "note") for e in Log(server.run.folder).events())
    assert "reviewing as</span> <bdi>ana" in ana.get("/").text


@pytest.mark.parametrize("path", POSTS)
def test_a_post_of_a_form_is_refused(ana, path):
    response = ana.http.post(
        path, content="name=eve", headers={"x-equicam-csrf": ana.csrf, "content-type": "text/plain"}
    )
    assert response.status_code == 415


def test_every_session_has_its_own_secret(server, ana):
    bo = server.client("bo")
    assert ana.csrf != bo.csrf
    assert ana.post("/api/reviewer", {"name": "x"}, **{"x-equicam-csrf": bo.csrf}).status_code == 403


def test_a_large_body_is_refused_even_in_chunks(ana):
    headers = {"x-equicam-csrf": ana.csrf, "content-type": "application/json"}
    assert ana.http.post("/api/note", content=b"x" * 20_000, headers=headers).status_code == 413
    pieces = (b"x" * 1000 for _ in range(30))
    assert ana.http.post("/api/note", content=pieces, headers=headers).status_code == 413


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(ana, method):
    assert ana.http.request(method, "/api/verdict").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/reviewer",
        "/nowhere",
        "/api/queue",
        "/api/item/0",
        "/static/review.js",
        "/static/none",
        "/item/0",
    ],
)
def test_every_response_has_the_security_headers(server, ana, path):
    for response in (ana.get(path), unauthorised(server).get(path)):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["x-frame-options"] == "DENY"
        assert "no-" in response.headers["cache-control"]
        assert "access-control-allow-origin" not in response.headers


def test_pages_hold_no_inline_script_style_or_foreign_address(ana):
    from tests.audit.faked import Page

    key = ana.list()[0]["key"]
    for path in ("/", "/reviewer", f"/item/{key}", "/item/0"):
        page = Page(ana.get(path).text)
        assert all(a.get("src", "").startswith("/static/") for a in page.every("script"))
        assert not page.every("style")
        for tag, attributes in page.elements:
            assert not {a for a in attributes if a == "style" or a.startswith("on")}, tag
            for name in ("src", "href", "action", "data-src"):
                assert not attributes.get(name) or attributes[name].startswith(("/", "#"))


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/image/../../manifest.json", "/image/..%2f..%2fmanifest/input",
        "/image/manifest.json/input", "/item/..%2f..%2f..%2fetc%2fpasswd", "/export/verdicts...%2fevents.sqlite", "/events.sqlite", "/image/{key}/..%2finput",
        "/image/{key}/view-999", "/image/{key}/thumb--1", "/image/{key}/scale", "/image/scale/input",
    ],
)  # fmt: skip
def test_no_path_reaches_a_file(ana, path):
    response = ana.get(path.format(key=ana.list()[0]["key"]))
    assert response.status_code == 404
    assert "root:" not in response.text
    assert len(response.content) < 3000
