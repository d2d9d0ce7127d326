"""The review server under floods: a reviewer's page still comes, and the log gets one line."""

import contextlib
import http.client
import json
import re
import resource
import socket
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.audit.faked import fake_run
from tests.web.conftest import rank
from tests.web.server_process import ServerProcess

FLOOD_LINE = "too many connections, or requests that do not arrive whole"
MAX_PAGE_SECONDS = 2
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"


@pytest.fixture(scope="module", autouse=True)
def descriptors():
    """This process needs more descriptors than the server it floods."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rank(fake_run(tmp_path_factory.mktemp("load")))


class Reviewer:
    """Opens pages as a browser does, each on a new connection, and notes how long the slowest took."""

    def __init__(self, server):
        self.port, self.tls, self.slowest = server.port, server.address.startswith("https"), 0
        response = self._get(urlsplit(server.address).query.join(("/?", "")))
        cookies = [
            value.split(";")[0] for name, value in response.getheaders() if name.lower() == "set-cookie"
        ]
        self.cookie = "; ".join(cookies)
        self.csrf = re.search(r'data-csrf="([^"]+)"', self.page("/reviewer"))[1]
        self.key = json.loads(self.page("/api/queue"))["items"][0]["key"]
        self.page(f"/item/{self.key}")
        self.slowest = 0

    def page(self, path):
        began = time.monotonic()
        response = self._get(path, cookie=self.cookie)
        assert response.status == 200
        body = response.read().decode()
        self.slowest = max(self.slowest, time.monotonic() - began)
        return body

    def _get(self, path, **headers):
        if self.tls:
            trusting = ssl._create_unverified_context()
            link = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=trusting)
        else:
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        link.request("GET", path, headers=headers)
        return link.getresponse()

    def pages_for(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.page("/")
            self.page(f"/item/{self.key}")
            time.sleep(0.05)


class Flood(threading.Thread):
    """Connections that each send a beginning, and then one byte per second."""

    def __init__(self, port, count, beginning, *, trickle=b""):
        super().__init__(daemon=True)
        self.port, self.count, self.beginning, self.trickle = port, count, beginning, trickle
        self.links, self.stopped, self.complete = [], threading.Event(), threading.Event()
        self.received = b""

    def run(self):
        for _ in range(self.count):
            with contextlib.suppress(OSError):
                link = socket.create_connection(("127.0.0.1", self.port), timeout=20)
                self.links.append(link)
                link.sendall(self.beginning)
            if self.stopped.is_set():
                return
        self.complete.set()
        while self.trickle and not self.stopped.wait(1):
            for link in self.links:
                with contextlib.suppress(OSError):
                    link.send(self.trickle)

    def open_links(self):
        """Those that the server has not closed."""
        found = 0
        for link in self.links:
            link.setblocking(False)
            with contextlib.suppress(OSError):
                try:
                    while piece := link.recv(65536):
                        self.received += piece
                except BlockingIOError:
                    found += 1
        return found

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.join(30)
        for link in self.links:
            link.close()


def lines_of(server):
    return sum(FLOOD_LINE in line for line in "".join(server.output).splitlines())


HALF_HEADERS = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


@pytest.mark.parametrize(
    ("connections", "files", "beginning"),
    [
        (200, 128, HALF_HEADERS),
        pytest.param(1100, 4096, HALF_HEADERS, marks=pytest.mark.slow),
        pytest.param(1500, 1024, HALF_HEADERS, marks=pytest.mark.slow),
        pytest.param(1500, 1024, b"", marks=pytest.mark.slow),
    ],
)
def test_connections_without_a_request_leave_room_for_a_reviewer(run, connections, files, beginning):
    with ServerProcess(run, before=LIMITED.format(files)) as server:
        reviewer = Reviewer(server)
        with Flood(server.port, connections, beginning) as flood:
            while not flood.complete.is_set():
                reviewer.pages_for(0.2)
            reviewer.pages_for(1)
            assert len(flood.links) == connections
            assert flood.open_links() <= min(512, files // 2)
            if Path("/proc/self/fd").exists():
                assert len([*Path(f"/proc/{server.process.pid}/fd").iterdir()]) < 0.75 * files
    assert reviewer.slowest < MAX_PAGE_SECONDS
    assert lines_of(server) == 1
    assert "Traceback" not in "".join(server.output)
    print(f"{connections} connections: slowest page {reviewer.slowest:.2f} s")


def test_connections_that_never_finish_the_tls_handshake_leave_room_too(run, certificate):
    files = ["--certificate", certificate.with_suffix(".pem"), "--key", certificate.with_suffix(".key")]
    with ServerProcess(run, *files, before=LIMITED.format(128)) as server:
        reviewer = Reviewer(server)
        with Flood(server.port, 200, b"\x16\x03\x01") as flood:
            while not flood.complete.is_set():
                reviewer.pages_for(0.2)
            for _ in range(20):  # until none waits to be accepted any more
                reviewer.pages_for(0.25)
                if flood.open_links() <= 64:
                    break
            assert flood.open_links() <= 64
    assert reviewer.slowest < MAX_PAGE_SECONDS
    assert lines_of(server) == 1


def slow_post(reviewer, *, cookie=True):
    lines = [
        "POST /api/note HTTP/1.1", f"Host: 127.0.0.1:{reviewer.port}", "Content-Type: application/json",
        "Content-Length: 600", f"X-Equicam-CSRF: {reviewer.csrf}",
    ]  # fmt: skip
    lines += [f"Cookie: {reviewer.cookie}"] if cookie else []
    return ("\r\n".join(lines) + "\r\n\r\n{").encode()


@pytest.mark.parametrize(("connections", "seconds"), [(60, 1), pytest.param(300, 10, marks=pytest.mark.slow)])
def test_slow_bodies_of_a_reviewer_end_at_the_deadline(run, connections, seconds):
    shorter = f"import equicam.runs.review.auth as auth; auth.MAX_BODY_SECONDS = {seconds}"
    with ServerProcess(run, before=shorter) as server:
        reviewer = Reviewer(server)
        with Flood(server.port, connections, slow_post(reviewer), trickle=b" ") as flood:
            assert flood.complete.wait(30)
            assert flood.open_links() > connections / 2
            reviewer.pages_for(seconds + 1)
            assert flood.open_links() == 0
            assert b"408 Request Timeout" in flood.received
    assert reviewer.slowest < MAX_PAGE_SECONDS
    print(f"{connections} slow bodies: slowest page {reviewer.slowest:.2f} s")


def test_a_request_must_arrive_whole_within_its_deadline(run):
    shorter = "import equicam.runs.review.connections as c; c.MAX_ARRIVAL_SECONDS = 1"
    with ServerProcess(run, before=shorter) as server:
        reviewer = Reviewer(server)
        whole = f"GET /static/review.css HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        beginnings = [
            HALF_HEADERS,
            b"",
            f"{whole}\r\nGET ".encode(),
            f"{whole}Content-Length: 9\r\n\r\n".encode(),
        ]
        with contextlib.ExitStack() as stack:
            floods = [
                stack.enter_context(Flood(server.port, 20, one, trickle=b"x" if one else b""))
                for one in beginnings
            ]
            assert all(flood.complete.wait(30) for flood in floods)
            reviewer.pages_for(2.5)
            assert [flood.open_links() for flood in floods] == [0] * len(floods)
    assert reviewer.slowest < MAX_PAGE_SECONDS
    assert lines_of(server) == 1


def test_without_a_session_a_few_kilobytes_are_read(run):
    with ServerProcess(run) as server:
        reviewer = Reviewer(server)
        endless = b"GET / HTTP/1.1\r\nX: " + b"y" * 10_000_000
        post = slow_post(reviewer, cookie=False).replace(b"600", b"10000000") + b"y" * 10_000_000
        for beginning, limit in ((endless, 400_000), (post, 400_000)):
            link = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            sent, answer = 0, b""
            with contextlib.suppress(OSError):
                while sent < len(beginning):
                    sent += link.send(beginning[sent : sent + 16384])
            with contextlib.suppress(OSError):
                answer = link.recv(4096)
            assert sent < limit
            assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 401")
        assert reviewer.page("/")
    assert "Traceback" not in "".join(server.output)


def test_malformed_requests_write_nothing_into_the_log(run):
    with ServerProcess(run) as server:
        reviewer = Reviewer(server)
        for garbage in (
            b"\x00\xff\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"\r\n" * 100,
        ):
            with Flood(server.port, 20, garbage) as flood:
                assert flood.complete.wait(30)
        upgrade = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        with Flood(server.port, 20, upgrade.encode()) as flood:
            assert flood.complete.wait(30)
            reviewer.pages_for(0.3)
    written = "".join(server.output).splitlines()
    assert len(written) == 2, written  # the address, and how to stop it
