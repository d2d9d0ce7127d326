"""Odd hosts and origins."""

import pytest
from starlette.testclient import TestClient

from tests.audit.faked import fake_run
from tests.web.conftest import HOME, PORT, Server, rank

ODD_HOSTS = (
    "example.com#@127.0.0.1:{port}", "127.0.0.1:{port}#", "127.0.0.1#:{port}", "127.0.0.1:{port}#@example.com",
    "user@127.0.0.1:{port}", "user:pw@127.0.0.1:{port}", " 127.0.0.1:{port}", "127.0.0.1 :{port}", "127.0.0.1:{port}/static/",
    "127.0.0.1:{port}?x", "127.0.0.1:+{port}", "127.0.0.1:0{port}", "127.0.0.1:", "127.0.0.1", "[127.0.0.1:{port}", "127.0.0.1]:{port}",
    "[fe80::1%/static/#]:{port}", "[fe80::1%25eth0]:{port}", "[::1%#]:{port}", "127.0.0.1:{port},127.0.0.1:{port}", "",
    "127.0.0.1.:{port}", "0x7f000001:{port}", "2130706433:{port}", "127.1:{port}", "example.com:{port}", "example.com", "127.0.0.1.example.com:{port}", "127.0.0.1:1", "127.0.0.1:{port}/x", "[::1",
    "192.0.2.7:{port}", "[2001:db8::1]:{port}", "\u0661\u0662\u0667.0.0.1:{port}",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rank(fake_run(tmp_path_factory.mktemp("access")))


@pytest.mark.parametrize("path", ["/static/review.css", "/?token={token}"])
def test_odd_hosts_are_refused(run, path):
    server = Server(run)
    client = TestClient(server.app, base_url=HOME, follow_redirects=False)
    path = path.format(token=server.access.tokens[None])
    for odd in ODD_HOSTS:
        host = odd.format(port=PORT).encode()
        response = client.get(path, headers=[(b"host", host)])
        assert (response.status_code, "set-cookie" in response.headers) == (421, False), odd
    twice = [(b"host", f"127.0.0.1:{PORT}".encode())] * 2
    assert client.get(path, headers=twice).status_code == 421
    assert client.get("/static/review.css").status_code == 200


def test_odd_origins_are_refused(run):
    client = Server(run).client("ana")
    here = f"https://127.0.0.1:{PORT}"
    odd = ("http://[::1", "http://evil.example", "https://127.0.0.1", here, "null", "", "//")
    for origin in odd:
        assert client.post("/api/reviewer", {"name": "eve"}, origin=origin).status_code == 403, origin
