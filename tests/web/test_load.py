"""Fifty reviewers at once for a minute: run by hand.

python -m pytest tests/web/test_load.py -m slow -s
"""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from equicam.runs.log import Log
from tests.audit.faked import fake_run
from tests.web.conftest import events, rank
from tests.web.server_process import Browser, ServerProcess

CLIENTS, SECONDS, PAUSE = 50, 60, 1.0  # seconds between two images, give or take a half


def review(server, number, until):
    """Open image after image as the page does, and give a verdict on each; seconds of item pages, and all statuses."""
    browser, chance = Browser(server, f"reviewer {number}"), random.Random(number)
    took, status = [], []
    for key in chance.sample(browser.keys, len(browser.keys)):
        if time.monotonic() > until:
            break
        body = {"key": key, "verdict": "supports", "previous_event": 0, "mark": f"load-{number}-{key}"}
        began = time.monotonic()
        status.append(browser.request("GET", f"/item/{key}").status)
        took.append(time.monotonic() - began)
        status += [browser.request("GET", f"/image/{key}/{kind}").status for kind in ("input", "map")]
        status.append(browser.request("POST", "/api/verdict", body).status)
        shown = ("presented", "peum", "strip")  # with the verdict
        status += [browser.request("GET", f"/image/{key}/{kind}").status for kind in shown]
        time.sleep(PAUSE * (0.5 + chance.random()))
    return took, status


@pytest.mark.slow
def test_fifty_clients_for_a_minute(tmp_path):
    run = rank(fake_run(tmp_path, count=220), budget="90%")
    with ServerProcess(run) as server, ThreadPoolExecutor(CLIENTS) as clients:
        until = time.monotonic() + SECONDS
        found = list(clients.map(lambda number: review(server, number, until), range(CLIENTS)))
    status = Counter(one for _, some in found for one in some)
    took = np.array([one for some, _ in found for one in some])
    p50, p95, p99 = (1000 * np.quantile(took, (0.5, 0.95, 0.99))).round()
    print(
        f"\n{CLIENTS} clients, {SECONDS} s: {took.size:,} item pages and verdicts; responses {dict(status)}"
    )
    print(f"item page: p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms")
    assert set(status) <= {200, 404}  # 404: an image that is missing or changed, on purpose
    assert len(events(run)) == took.size > CLIENTS
    assert Log(run.folder).problems() == []
    assert p95 < 2000
