"""A ranked run without a model, its page behind the door, and a browser that came with the token."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from equicam.auditing.store import SAMPLE, RunStore
from equicam.auditing.triage import ROWS, triage
from equicam.review.app import make_app
from equicam.review.auth import Door
from equicam.shards import write_table
from tests.audit.faked import fake_run

PORT = 8321
HOME = f"http://127.0.0.1:{PORT}"


def ranked(run, *, budget="60%", by="peum"):
    """As `equicam triage` leaves a run."""
    found = triage(run.read_items(), by=by, budget=budget, angles=run.manifest.angles, classes=run.manifest.classes)
    write_table(run.folder / "triage.parquet", found.rows)
    ids = found.rows["id"].to_pylist()
    told = {ids[0]: {"verdict": "Leans to signal: evidence words", "lines": ["a line of evidence"]}}
    (run.folder / "evidence.json").write_text(json.dumps(told))
    return run


class Reader:
    """A browser of one reviewer."""

    def __init__(self, door, app, name=None):
        self.door, self.http = door, TestClient(app, base_url=HOME, follow_redirects=False)
        assert self.http.get(f"/?token={door.token}").status_code == 303
        if name:
            assert self.post("/api/reviewer", {"name": name}).status_code == 200

    def get(self, path, **options):
        return self.http.get(path, **options)

    @property
    def csrf(self):
        return re.search(r'data-csrf="([^"]+)"', self.http.get("/who").text)[1]

    def post(self, path, body, **headers):
        told = {"x-equicam-csrf": self.csrf, "content-type": "application/json"} | headers
        return self.http.post(path, content=json.dumps(body), headers=told)

    def list(self, **wanted):
        answer = self.get("/api/queue", params={"limit": 200} | wanted)
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]

    def decide(self, key, verdict, *, reason="", seen=0, mark=None):
        body = {
            "key": key,
            "verdict": verdict,
            "reason": reason,
            "seen": seen,
            "mark": mark or f"mark-{key}-{seen}-{id(self)}",
        }
        return self.post("/api/verdict", body)


class House:
    """A run with its page."""

    def __init__(self, run, *, blind=True, reviewer=None, exposed=False):
        self.run, self.door = run, Door(port=PORT, reviewer=reviewer, exposed=exposed)
        self.app = make_app(run, self.door, blind=blind)

    def reader(self, name="ana"):
        return Reader(self.door, self.app, name)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return ranked(fake_run(tmp_path_factory.mktemp("made")))


@pytest.fixture
def run(made, tmp_path):
    """A copy of its own for every test; the pictures stay where they are."""
    return RunStore(shutil.copytree(made.folder, tmp_path / "run"))


@pytest.fixture
def house(run):
    return House(run)


@pytest.fixture
def ana(house):
    return house.reader("ana")


def many(folder, count=100_000):
    """A run of very many pictures, of which only the queue and the sample are there."""
    run = RunStore(folder / "run")
    (run.folder / "items").mkdir(parents=True)
    (run.folder / "maps").mkdir()
    spec = fake_run(folder / "small").manifest
    (run.folder / "manifest.json").write_text(replace(spec, images=count).dumps())
    ids = [f"tile-{i:06d}.png" for i in range(count)]
    arm = np.where(np.arange(count) % 5 == 4, "control", "queue")
    sample = {
        "id": ids,
        "path": ids,
        "label": [None] * count,
        "shard": [0] * count,
        "calibration": [False] * count,
    }
    write_table(run.folder / "sample.parquet", pa.table(sample, schema=SAMPLE))
    rows = {
        "id": ids, "arm": arm.tolist(), "rank": list(range(1, count + 1)), "place": list(range(1, count + 1)),
        "peum_score": [0.01] * count, "target": [0] * count, "class": ["normal"] * count, "confidence": [0.9] * count,
        "flags": [[]] * count, "reasons": [[]] * count,
    }  # fmt: skip
    write_table(
        run.folder / "triage.parquet", pa.table(rows, schema=pa.schema([ROWS.field(name) for name in rows]))
    )
    return run
