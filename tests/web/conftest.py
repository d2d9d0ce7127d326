"""A ranked run made without a model, its review server, and a client that came with the token."""

import io
import json
import re
import shutil
from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from starlette.testclient import TestClient

from equicam.runs.log import Log
from equicam.runs.review.app import make_app
from equicam.runs.review.auth import Access
from equicam.runs.store import SAMPLE, RunStore
from equicam.runs.triage import ROWS, triage
from equicam.runs.verdicts import read_review_key
from equicam.shards import read_table, write_table
from tests.audit.faked import Page, fake_run

PORT = 8321
HOME = f"http://127.0.0.1:{PORT}"


def rank(run, *, budget="60%", by="peum"):
    """Rank a run as `equicam triage` does, without Eq: its intervals are slow and change no rank."""
    items = run.read_items()
    without_eq = pa.nulls(items.num_rows, pa.float64())
    items = items.set_column(items.column_names.index("eq"), items.schema.field("eq"), without_eq)
    found = triage(
        items, by=by, budget=budget, transforms=run.manifest.transforms, classes=run.manifest.classes
    )
    write_table(run.folder / "triage.parquet", found.rows)
    return run


def key_of(run, name):
    """The key of an image in this run's URLs."""
    return read_review_key(run.folder).digest("item", name)[:20]


def queued(run):
    """The arm of every image in the queue, by id."""
    table = read_table(run.folder / "triage.parquet", ["id", "arm"])
    return dict(zip(table["id"].to_pylist(), table["arm"].to_pylist(), strict=True))


def by_key(run):
    return {key_of(run, name): name for name in queued(run)}


def assert_hidden(texts, *secrets):
    for text in texts:
        assert not any(secret in text for secret in secrets)
        assert not re.search(r"\b(control|arm|rank)\b", re.sub(r'"(arm|rank)": ?null', "", text))


def events(run, *kinds):
    return [event for event in Log(run.folder).events() if event.kind in (kinds or ("verdict",))]


class Client:
    """The browser of one reviewer."""

    def __init__(self, access, app, name=None, link=None, cookies=None):
        self.http = TestClient(app, base_url=HOME, follow_redirects=False, cookies=cookies)
        self.home = "/reviewer" if access.command == "review" else "/"
        assert self.http.get(f"/?token={access.tokens[link]}").status_code == 303
        if name:
            assert self.post("/api/reviewer", {"name": name}).status_code == 200

    def get(self, path, **options):
        return self.http.get(path, **options)

    def page(self, path="/"):
        return Page(self.get(path).text)

    def facts(self, key):
        return self.get(f"/api/item/{key}").json()

    def progress(self):
        return self.get("/api/progress").json()

    def image(self, key, kind, mode="RGB"):
        response = self.get(f"/image/{key}/{kind}")
        assert response.status_code == 200, response.text
        return np.asarray(Image.open(io.BytesIO(response.content)).convert(mode)).astype(float)

    @cached_property
    def csrf(self):
        return re.search(r'data-csrf="([^"]+)"', self.http.get(self.home).text)[1]

    def post(self, path, body, **headers):
        headers = {"x-equicam-csrf": self.csrf, "content-type": "application/json"} | headers
        return self.http.post(path, content=json.dumps(body), headers=headers)

    def list(self, **filters):
        answer = self.get("/api/queue", params={"limit": 200} | filters)
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]

    def list_keys(self, **filters):
        return [row["key"] for row in self.list(**filters)]

    def texts(self, key):
        """Everything this reviewer can load about an image."""
        row = next(one for one in self.list() if one["key"] == key)
        return [json.dumps(row), self.get(f"/api/item/{key}").text, self.get(f"/item/{key}").text]

    def decide_all(self, keys):
        assert {self.decide(key, "supports").status_code for key in keys} == {200}

    def decide(self, key, verdict, *, reason="", previous_event=0, mark=None):
        body = {"key": key, "verdict": verdict, "reason": reason, "previous_event": previous_event}
        return self.post("/api/verdict", body | {"mark": mark or f"mark-{key}-{previous_event}-{id(self)}"})


class Server:
    """The review application of a run."""

    def __init__(self, run, *, blind=True, blind_class=False, **access):
        self.run, self.access = run, Access(PORT, **access)
        self.app = make_app(run, self.access, blind=blind, blind_class=blind_class)

    def client(self, name="ana", **options):
        return Client(self.access, self.app, name, **options)


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory):
    """Read only."""
    return rank(fake_run(tmp_path_factory.mktemp("shared")))


@pytest.fixture
def run(shared_run, tmp_path):
    """A copy for one test; the image files are shared."""
    return RunStore(shutil.copytree(shared_run.folder, tmp_path / "run"))


@pytest.fixture
def server(run):
    return Server(run)


@pytest.fixture
def ana(server):
    return server.client("ana")


def large_run(folder, count=100_000):
    """A run of very many images, of which only the queue and the sample exist."""
    run = RunStore(folder / "run")
    (run.folder / "items").mkdir(parents=True)
    (run.folder / "maps").mkdir()
    spec = fake_run(folder / "small", count=11).manifest
    (run.folder / "manifest.json").write_text(replace(spec, images=count).dumps())
    ids = [f"tile-{i:06d}.png" for i in range(count)]
    arm = np.where(np.arange(count) % 5 == 4, "control", "queue")
    sample = {"id": ids, "path": ids, "label": [None] * count, "shard": [0] * count}
    sample["calibration"] = [False] * count
    write_table(run.folder / "sample.parquet", pa.table(sample, schema=SAMPLE))
    rows = {
        "id": ids, "arm": arm.tolist(), "rank": list(range(1, count + 1)), "place": list(range(1, count + 1)),
        "peum_score": [0.01] * count, "target": [0] * count, "class": ["normal"] * count, "confidence": [0.9] * count,
        "flags": [[]] * count, "reasons": [[]] * count, "by": ["stability"] * count,
    }  # fmt: skip
    rows |= {name: [None] * count for name in ROWS.names if name not in rows}
    write_table(run.folder / "triage.parquet", pa.table(rows, schema=ROWS))
    return run
