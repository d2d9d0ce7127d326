"""Fifty readers at once for a minute: run by hand.

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

from equicam.auditing.log import Log
from tests.audit.faked import fake_run
from tests.web.conftest import ranked
from tests.web.served import Served

pytestmark = pytest.mark.slow
CLIENTS, SECONDS, PAUSE = 50, 60, 1.0  # a pause between two pictures of half to one and a half seconds


class Client(threading.Thread):
    """Opens picture after picture as the page does, and gives a verdict on each."""

    def __init__(self, served, number, until):
        super().__init__()
        self.served, self.number, self.until = served, number, until
        self.took, self.status, self.verdicts = [], Counter(), 0
        self.random = random.Random(number)

    def run(self):
        parts = urlsplit(self.served.address)
        self.link = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=30)
        self.cookie = ""
        self.cookie = self.ask("GET", f"/?{parts.query}")[1].split(";")[0]
        self.secret = re.search(r'data-csrf="([^"]+)"', self.ask("GET", "/who")[0].decode())[1]
        self.ask("POST", "/api/reviewer", {"name": f"reader {self.number}"})
        rows = json.loads(self.ask("GET", "/api/queue?limit=200")[0])["items"]
        self.random.shuffle(rows)
        while time.monotonic() < self.until and rows:
            key = rows.pop()["key"]
            began = time.monotonic()
            self.ask("GET", f"/item/{key}")
            self.took.append(time.monotonic() - began)
            for kind in ("photo", "single", "map", "peum", "strip"):
                self.ask("GET", f"/picture/{key}/{kind}")
            body = {"key": key, "verdict": "supports", "seen": 0, "mark": f"load-{self.number}-{key}"}
            self.ask("POST", "/api/verdict", body)
            self.verdicts += 1
            time.sleep(PAUSE * (0.5 + self.random.random()))

    def ask(self, method, path, body=None):
        headers = {"cookie": self.cookie}
        if body is not None:
            headers |= {"content-type": "application/json", "x-equicam-csrf": self.secret}
        self.link.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.link.getresponse()
        self.status[answer.status] += 1
        return answer.read(), answer.headers.get("set-cookie", "")


def test_fifty_clients_for_a_minute(tmp_path):
    run = ranked(fake_run(tmp_path, count=220), budget="90%")
    with Served(run) as served:
        until = time.monotonic() + SECONDS
        clients = [Client(served, i, until) for i in range(CLIENTS)]
        [c.start() for c in clients]
        [c.join() for c in clients]
    status = sum((c.status for c in clients), Counter())
    took = np.array([t for c in clients for t in c.took])
    verdicts = sum(c.verdicts for c in clients)
    p50, p95, p99 = (1000 * np.quantile(took, (0.5, 0.95, 0.99))).round()
    print(
        f"\n{CLIENTS} clients, {SECONDS} s: {sum(status.values()):,} requests, {took.size:,} item pages, {verdicts:,} verdicts"
    )
    print(f"item page: p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms; answers {dict(status)}")
    assert set(status) <= {200, 303, 404}  # 404: a picture that is missing or changed, on purpose
    log = Log(run.folder)
    assert len(log.events("verdict")) == verdicts > CLIENTS
    assert log.problems() == []
    assert p95 < 2000
