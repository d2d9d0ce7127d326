"""Fifty reviewers at once for a minute: run by hand.

python -m pytest tests/web/test_load.py -m slow -s
"""

import http.client
import json
import random
import re
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

import numpy as np
import pytest

from equicam.runs.log import Log
from tests.audit.faked import fake_run
from tests.web.conftest import rank
from tests.web.server_process import ServerProcess

pytestmark = pytest.mark.slow
CLIENTS, SECONDS, PAUSE = 50, 60, 1.0  # seconds between two images, give or take a half


class Client(threading.Thread):
    """Opens image after image as the page does, and gives a verdict on each."""

    def __init__(self, server, number, until):
        super().__init__()
        self.server, self.number, self.until = server, number, until
        self.took, self.status, self.verdicts = [], Counter(), 0
        self.random = random.Random(number)

    def run(self):
        parts = urlsplit(self.server.address)
        self.link = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=30)
        self.cookie = ""
        cookies = self.request("GET", f"/?{parts.query}")[1]
        self.cookie = "; ".join(cookie.split(";")[0] for cookie in cookies)
        self.secret = re.search(r'data-csrf="([^"]+)"', self.request("GET", "/reviewer")[0].decode())[1]
        self.request("POST", "/api/reviewer", {"name": f"reviewer {self.number}"})
        rows = json.loads(self.request("GET", "/api/queue?limit=200")[0])["items"]
        self.random.shuffle(rows)
        while time.monotonic() < self.until and rows:
            key = rows.pop()["key"]
            began = time.monotonic()
            self.request("GET", f"/item/{key}")
            self.took.append(time.monotonic() - began)
            for kind in ("input", "map"):
                self.request("GET", f"/image/{key}/{kind}")
            body = {
                "key": key,
                "verdict": "supports",
                "previous_event": 0,
                "mark": f"load-{self.number}-{key}",
            }
            self.request("POST", "/api/verdict", body)
            self.verdicts += 1
            for kind in ("presented", "peum", "strip"):  # shown with the verdict
                self.request("GET", f"/image/{key}/{kind}")
            time.sleep(PAUSE * (0.5 + self.random.random()))

    def request(self, method, path, body=None):
        headers = {"cookie": self.cookie}
        if body is not None:
            headers |= {"content-type": "application/json", "x-equicam-csrf": self.secret}
        self.link.request(method, path, None if body is None else json.dumps(body), headers)
        response = self.link.getresponse()
        self.status[response.status] += 1
        return response.read(), response.headers.get_all("set-cookie", [])


def test_fifty_clients_for_a_minute(tmp_path):
    run = rank(fake_run(tmp_path, count=220), budget="90%")
    with ServerProcess(run) as server:
        until = time.monotonic() + SECONDS
        clients = [Client(server, i, until) for i in range(CLIENTS)]
        [c.start() for c in clients]
        [c.join() for c in clients]
    status = sum((c.status for c in clients), Counter())
    took = np.array([t for c in clients for t in c.took])
    verdicts = sum(c.verdicts for c in clients)
    p50, p95, p99 = (1000 * np.quantile(took, (0.5, 0.95, 0.99))).round()
    print(
        f"\n{CLIENTS} clients, {SECONDS} s: {sum(status.values()):,} requests, {took.size:,} item pages, {verdicts:,} verdicts"
    )
    print(f"item page: p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms; responses {dict(status)}")
    assert set(status) <= {200, 303, 404}  # 404: an image that is missing or changed, on purpose
    log = Log(run.folder)
    assert len(log.events("verdict")) == verdicts > CLIENTS
    assert log.problems() == []
    assert p95 < 2000
