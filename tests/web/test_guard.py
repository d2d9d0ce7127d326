"""Nobody comes in without the token, nothing is posted from elsewhere, and every answer is dressed."""

import pytest
from starlette.testclient import TestClient

from equicam.auditing.log import Log
from tests.web.conftest import HOME, PORT, House

EVERYWHERE = [
    "/",
    "/who",
    "/item/0",
    "/api/queue",
    "/api/progress",
    "/api/item/0",
    "/picture/0/photo",
    "/export/verdicts.csv",
]


def stranger(house, **options):
    return TestClient(house.app, base_url=options.pop("base_url", HOME), follow_redirects=False, **options)


@pytest.mark.parametrize("path", EVERYWHERE)
def test_without_the_token_nothing_opens(house, path):
    answer = stranger(house).get(path)
    assert answer.status_code == 401
    assert house.door.token not in answer.text


@pytest.mark.parametrize("token", ["", "wrong", "é", "x" * 5000])
def test_a_wrong_token_opens_nothing(house, token):
    answer = stranger(house).get("/", params={"token": token})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_the_token_becomes_a_cookie_and_leaves_the_address(house):
    client = stranger(house)
    answer = client.get(f"/item/abc?flag=blank&token={house.door.token}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/item/abc?flag=blank")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert house.door.token not in cookie
    assert client.get("/who").status_code == 200


def test_the_redirect_stays_here(house):
    answer = stranger(house).get(f"//evil.example/x?token={house.door.token}")
    assert answer.headers["location"].startswith("/")
    assert not answer.headers["location"].startswith("//")


def test_every_start_has_its_own_token_and_forgets_the_old_cookie(run):
    first, second = House(run), House(run)
    assert first.door.token != second.door.token
    client = stranger(first)
    client.get(f"/?token={first.door.token}")
    other = stranger(second, cookies=dict(client.cookies))
    assert other.get("/who").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{PORT}", "", f"a@127.0.0.1:{PORT}", f"127.0.0.1:{PORT}/x", "[::1"]
)  # fmt: skip
def test_other_host_names_are_not_answered(house, host):
    answer = stranger(house).get(f"/?token={house.door.token}", headers={"host": host})
    assert answer.status_code == 421


@pytest.mark.parametrize(
    "host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}"]
)
def test_loopback_names_are(house, host):
    assert stranger(house).get("/static/review.css", headers={"host": host}).status_code == 200


def test_exposed_it_answers_to_addresses_and_still_not_to_names(run):
    house = House(run, exposed=True)
    for host, status in (
        (f"192.0.2.7:{PORT}", 200),
        (f"[2001:db8::1]:{PORT}", 200),
        (f"evil.example:{PORT}", 421),
    ):
        assert stranger(house).get("/static/review.css", headers={"host": host}).status_code == status
    assert (
        stranger(House(run)).get("/static/review.css", headers={"host": f"192.0.2.7:{PORT}"}).status_code
        == 421
    )


POSTS = {
    "/api/verdict": {"key": "0" * 20, "verdict": "supports", "seen": 0, "mark": "12345678"},
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
def test_a_forged_post_is_refused(house, ana, path, headers):
    answer = ana.post(path, POSTS[path], **headers)
    assert answer.status_code == 403
    assert not any(e.kind in ("verdict", "note") for e in Log(house.run.folder).events())
    assert "reading as</span> <bdi>ana" in ana.get("/").text


@pytest.mark.parametrize("path", POSTS)
def test_a_post_of_a_form_is_refused(ana, path):
    answer = ana.http.post(
        path, content="name=eve", headers={"x-equicam-csrf": ana.csrf, "content-type": "text/plain"}
    )
    assert answer.status_code == 415


def test_the_secret_of_one_session_is_not_that_of_another(house, ana):
    bo = house.reader("bo")
    assert ana.csrf != bo.csrf
    assert ana.post("/api/reviewer", {"name": "x"}, **{"x-equicam-csrf": bo.csrf}).status_code == 403


def test_a_large_body_is_refused_also_in_pieces(ana):
    headers = {"x-equicam-csrf": ana.csrf, "content-type": "application/json"}
    assert ana.http.post("/api/note", content=b"x" * 20_000, headers=headers).status_code == 413
    pieces = (b"x" * 1000 for _ in range(30))
    assert ana.http.post("/api/note", content=pieces, headers=headers).status_code == 413


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(ana, method):
    assert ana.http.request(method, "/api/verdict").status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/", "/who", "/nowhere", "/api/queue", "/api/item/0", "/static/review.js", "/static/none", "/item/0"],
)
def test_every_answer_carries_the_headers(house, ana, path):
    for answer in (ana.get(path), stranger(house).get(path)):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "no-" in answer.headers["cache-control"]
        assert "access-control-allow-origin" not in answer.headers


def test_pages_hold_no_inline_script_style_or_foreign_address(ana):
    from tests.audit.faked import Page

    key = ana.list()[0]["key"]
    for path in ("/", "/who", f"/item/{key}", "/item/0"):
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
        "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/picture/../../manifest.json", "/picture/..%2f..%2fmanifest/photo",
        "/picture/manifest.json/photo", "/item/..%2f..%2f..%2fetc%2fpasswd", "/export/verdicts...%2fevents.sqlite", "/events.sqlite", "/picture/{key}/..%2fphoto",
        "/picture/{key}/view-999", "/picture/{key}/thumb--1", "/picture/{key}/scale", "/picture/scale/photo",
    ],
)  # fmt: skip
def test_no_path_reaches_a_file(ana, path):
    answer = ana.get(path.format(key=ana.list()[0]["key"]))
    assert answer.status_code == 404
    assert "root:" not in answer.text
    assert len(answer.content) < 3000
