"""Odd hosts, an exposed page, and TLS."""

import http.client
import json
import ssl
import subprocess
import urllib.error
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from equicam.runs.log import Log
from tests.audit.conftest import equicam_command
from tests.audit.faked import fake_run
from tests.web.conftest import HOME, PORT, Server, rank
from tests.web.server_process import ServerProcess

ODD_HOSTS = (
    "example.com#@127.0.0.1:{port}", "127.0.0.1:{port}#", "127.0.0.1#:{port}", "127.0.0.1:{port}#@example.com",
    "user@127.0.0.1:{port}", "user:pw@127.0.0.1:{port}", " 127.0.0.1:{port}", "127.0.0.1 :{port}", "127.0.0.1:{port}/static/",
    "127.0.0.1:{port}?x", "127.0.0.1:+{port}", "127.0.0.1:0{port}", "127.0.0.1:", "127.0.0.1", "[127.0.0.1:{port}", "127.0.0.1]:{port}",
    "[fe80::1%/static/#]:{port}", "[fe80::1%25eth0]:{port}", "[::1%#]:{port}", "127.0.0.1:{port},127.0.0.1:{port}", "",
    "127.0.0.1.:{port}", "0x7f000001:{port}", "2130706433:{port}", "127.1:{port}", "example.com:{port}", "\u0661\u0662\u0667.0.0.1:{port}",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rank(fake_run(tmp_path_factory.mktemp("access")))


@pytest.mark.parametrize("exposed", [False, True])
@pytest.mark.parametrize("path", ["/static/review.css", "/?token={token}"])
def test_odd_hosts_are_refused(run, exposed, path):
    server = Server(run, exposed=exposed, hosts=("review.example",) if exposed else ())
    client = TestClient(server.app, base_url=HOME, follow_redirects=False)
    path = path.format(token=server.access.tokens[None])
    for odd in ODD_HOSTS:
        host = odd.format(port=PORT).encode()
        response = client.get(path, headers=[(b"host", host)])
        assert (response.status_code, "set-cookie" in response.headers) == (421, False), odd
    twice = [(b"host", f"127.0.0.1:{PORT}".encode())] * 2
    assert client.get(path, headers=twice).status_code == 421
    assert client.get("/static/review.css").status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://[::1", "http://evil.example", "https://127.0.0.1", "null", "", "//"]
)
def test_odd_origins_are_refused(run, origin):
    client = Server(run).client("ana")
    assert client.post("/api/reviewer", {"name": "eve"}, origin=origin).status_code == 403


def raw_request(server, path, *, host, cookie="", tls=None):
    make = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    link = make("127.0.0.1", server.port, timeout=20, **({} if tls is None else {"context": tls}))
    link.putrequest("GET", path, skip_host=True)
    link.putheader("Host", host)
    if cookie:
        link.putheader("Cookie", cookie)
    link.endheaders()
    return link.getresponse()


def test_an_exposed_page_has_personal_links_and_answers_to_its_own_names(run):
    options = ["--host", "0.0.0.0", "--expose", "--reviewer", "ana", "--reviewer", "bo b"]
    with ServerProcess(run, *options) as server:
        assert list(server.links) == ["ana", "bo b"]
        path = "/?" + urlsplit(server.links["bo b"]).query
        for host, status in (
            (f"127.0.0.1:{server.port}", 303),
            (f"192.0.2.7:{server.port}", 303),
            (f"evil.example:{server.port}", 421),
            ("127.0.0.1", 421),
            (f"example.com#@127.0.0.1:{server.port}", 421),
        ):
            assert raw_request(server, path, host=host).status == status
        response = raw_request(server, path, host=f"127.0.0.1:{server.port}")
        cookies = response.headers.get_all("set-cookie")
        assert len(cookies) == 2
        assert all("HttpOnly" in one and "SameSite" in one and "Secure" not in one for one in cookies)
        cookie = "; ".join(one.split(";")[0] for one in cookies)
        page = raw_request(server, "/", host=f"127.0.0.1:{server.port}", cookie=cookie).read().decode()
        assert "reviewing as</span> <bdi>bo b" in page
        client = server.client()
        with pytest.raises(urllib.error.HTTPError, match="422"):
            server.post(client, server.secret(client), "/api/reviewer", {"name": "eve"})
    text = " ".join("".join(server.output).split())
    assert "readable on the network" in text
    assert "under its name" in text
    opened = Log(run.folder).events("review opened")[-1].payload
    assert opened == {"blind": True, "blind_class": False, "exposed": True, "reviewers": ["ana", "bo b"]}


def test_tls(run, certificate):
    files = ["--certificate", certificate.with_suffix(".pem"), "--key", certificate.with_suffix(".key")]
    with ServerProcess(run, "--host", "0.0.0.0", "--expose", *files) as server:
        assert server.address.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=certificate.with_suffix(".pem"))
        host = f"127.0.0.1:{server.port}"
        response = raw_request(server, "/?" + urlsplit(server.address).query, host=host, tls=trusting)
        cookies = response.headers.get_all("set-cookie")
        assert response.status == 303
        assert len(cookies) == 2
        assert all("Secure" in one and "HttpOnly" in one for one in cookies)
        cookie = "; ".join(one.split(";")[0] for one in cookies)
        page = raw_request(server, "/reviewer", host=host, cookie=cookie, tls=trusting).read().decode()
        assert "Who is reviewing?" in page
        link = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=trusting)
        csrf = page.partition('data-csrf="')[2].partition('"')[0]
        headers = {
            "content-type": "application/json",
            "x-equicam-csrf": csrf,
            "cookie": cookie,
            "origin": f"https://{host}",
        }
        link.request("POST", "/api/reviewer", json.dumps({"name": "ana"}), headers)
        assert link.getresponse().status == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            raw_request(server, "/", host=host)  # without TLS
    text = "".join(server.output)
    assert "readable on the network" not in text
    assert "Traceback" not in text


def test_tls_files_that_do_not_work_are_named(run, certificate, tmp_path):
    pem, key = certificate.with_suffix(".pem"), certificate.with_suffix(".key")
    other, locked, text = tmp_path / "other.key", tmp_path / "locked.key", tmp_path / "text.pem"
    text.write_text("not a certificate")
    make = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run([*make, "-out", other], check=True, capture_output=True)
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:word", "-out", locked],
        check=True,
        capture_output=True,
    )
    for options, message in (
        (["--certificate", pem], "TLS needs --certificate and --key, got only --certificate; try --key"),
        (["--key", key], "TLS needs --certificate and --key, got only --key; try --certificate"),
        (["--certificate", tmp_path / "none.pem", "--key", key], "none.pem needs a PEM file that can be read, got No such file"),
        (["--certificate", pem, "--key", tmp_path], "needs a PEM file that can be read, got Is a directory"),
        (["--certificate", pem, "--key", other], "got a key of another certificate"),
        (["--certificate", pem, "--key", locked], "got a key with a password"),
        (["--certificate", text, "--key", key], "got a file that is damaged or no PEM"),
        (["--certificate", pem, "--key", text], "got a file that is damaged or no PEM"),
    ):  # fmt: skip
        code, output = equicam_command("review", run.folder, "--no-browser", *options)
        assert code == 2, options
        assert message in " ".join(output.split()), output
