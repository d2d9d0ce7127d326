"""The review server under half-open connections, slow bodies and garbage: a reviewer's page still comes."""

import contextlib
import resource
import socket
import threading
import time

import pytest

from tests.audit.faked import fake_run
from tests.web.conftest import rank
from tests.web.server_process import Browser, ServerProcess

CONNECTIONS = 1500
MAX_PAGE_SECONDS = 5
HALF_HEADERS = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
SHORT = "import h11, equicam.runs.review.server as s; s.MAX_SECONDS = {h11.IDLE: 1, h11.SEND_BODY: 3}"


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


class Reviewer(Browser):
    """Opens pages, and notes how long the slowest took."""

    slowest = 0

    def pages_for(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for path in ("/", f"/item/{self.keys[0]}"):
                began = time.monotonic()
                self.get(path)
                self.slowest = max(self.slowest, time.monotonic() - began)
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


def test_half_open_connections_do_not_stop_a_reviewers_page(run):
    """Half of them send half a header, the others nothing."""
    with ServerProcess(run, before=FEW_DESCRIPTORS) as server:
        reviewer = Reviewer(server, "ana")
        floods = [Flood(server.port, CONNECTIONS // 2, beginning) for beginning in (HALF_HEADERS, b"")]
        with floods[0], floods[1]:
            while not all(flood.complete.is_set() for flood in floods):
                reviewer.pages_for(0.2)
            reviewer.pages_for(4)
            assert sum(len(flood.links) for flood in floods) == CONNECTIONS
            assert [flood.open_links() for flood in floods] == [0, 0]
    print(f"{CONNECTIONS} half-open connections: slowest page {reviewer.slowest:.2f} s")
    assert 0 < reviewer.slowest < MAX_PAGE_SECONDS
    assert "Traceback" not in "".join(server.output)


def slow_post(reviewer, cookie):
    lines = [
        "POST /api/note HTTP/1.1", f"Host: 127.0.0.1:{reviewer.port}", "Content-Type: application/json",
        "Content-Length: 600", f"X-Equicam-CSRF: {reviewer.csrf}", f"Cookie: {cookie}",
    ]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n{").encode()


def test_headers_and_bodies_must_be_whole_before_their_deadlines(run):
    with ServerProcess(run, before=SHORT) as server:
        reviewer = Reviewer(server, "ana")
        whole = f"GET /static/review.css HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        refused = f"{whole}Content-Length: 9\r\n\r\n".encode()
        headers = [HALF_HEADERS, b"", f"{whole}\r\nGET ".encode(), refused]
        body = slow_post(reviewer, reviewer.cookie)
        with contextlib.ExitStack() as stack:
            floods = [
                stack.enter_context(Flood(server.port, 20, one, trickle=b"x" if one else b""))
                for one in (*headers, body)
            ]
            assert all(flood.complete.wait(30) for flood in floods)
            reviewer.pages_for(1.5)
            assert [flood.open_links() for flood in floods] == [0, 0, 0, 0, 20]
            reviewer.pages_for(2.5)
            assert [flood.open_links() for flood in floods] == [0] * 5
    assert 0 < reviewer.slowest < MAX_PAGE_SECONDS
    assert "Traceback" not in "".join(server.output)


def test_without_a_session_a_few_kilobytes_are_read(run):
    with ServerProcess(run) as server:
        reviewer = Reviewer(server, "ana")
        endless = b"GET / HTTP/1.1\r\nX: " + b"y" * 10_000_000
        post = slow_post(reviewer, "").replace(b"600", b"10000000") + b"y" * 10_000_000
        get = f"GET /static/review.css HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 10000000\r\n\r\n"
        for beginning in (endless, post, get.encode() + b"y" * 10_000_000):
            link = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            sent, answer = 0, b""
            with contextlib.suppress(OSError):
                while sent < len(beginning):
                    sent += link.send(beginning[sent : sent + 16384])
            with contextlib.suppress(OSError):
                answer = link.recv(4096)
            assert sent < 400_000
            assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 413")
        assert reviewer.get("/")
    assert "Traceback" not in "".join(server.output)


def test_malformed_requests_write_nothing_into_the_log(run):
    with ServerProcess(run) as server:
        reviewer = Reviewer(server, "ana")
        upgrade = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        twice = b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
        for garbage in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", twice, b"\r\n" * 100, upgrade.encode()):
            with Flood(server.port, 20, garbage) as flood:
                assert flood.complete.wait(30)
                reviewer.pages_for(0.1)
    written = "".join(server.output).splitlines()
    assert len(written) == 2, written  # the address, and how to stop it
