"""Several devices, or a Ray cluster: the same rows as one process alone, whatever is killed meanwhile."""

import contextlib
import importlib.util
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import equicam
from equicam.audit import compute
from equicam.audit.compute import AuditJob
from equicam.demo import synthetic_patches
from equicam.engines import devices
from equicam.engines.devices import Devices
from equicam.engines.worker import ModelCopy, ModelFromName, SharedFolder
from equicam.errors import EquicamError
from equicam.models.images import VisibleBoxes
from equicam.reasons import Reason, describe
from equicam.runs.store import RunStore
from tests.audit.conftest import ENV, OPTIONS, equicam_command, equicam_process, run_command
from tests.audit.test_run import drawn, rows
from tests.conftest import recipe

SMALL = {"object_store_memory": 300_000_000, "include_dashboard": False, "log_to_driver": False}
# a cluster of the tests' own, which nobody else can use
RAY_ENV = ENV | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
HAS_RAY = importlib.util.find_spec("ray") is not None
ray_there = pytest.mark.skipif(not HAS_RAY, reason="equicam[ray] is not installed")
ON_RAY = recipe("run.engine = 'ray'", "run.actors = 2")
EIGHT_ON_RAY = ("run.engine = 'ray'", "run.actors = 2", "run.shard_size = 8")
BY_EIGHT_ON_RAY = recipe(*EIGHT_ON_RAY)


def same(one: Path, other: Path) -> bool:
    return rows(one) == rows(other) and drawn(one) == drawn(other)


def shards(run: Path) -> list[Path]:
    return list(run.glob("items/*.parquet"))


def job(run: Path, **changed) -> AuditJob:
    source = ModelFromName("embedded")
    told = AuditJob(
        folder=SharedFolder.at(run / "manifest.json"), manifest=RunStore(run).manifest,
        calibration=frozenset(), model_source=source, preprocessing=source.preprocessing_only(equicam.load("embedded")),
        workers=1, image_bytes=0,
    )  # fmt: skip
    return replace(told, **changed)


@pytest.mark.slow
def test_two_devices_write_the_rows_of_one(patches, whole, tmp_path):
    run_command("audit", patches, "--out", tmp_path / "run", *OPTIONS, "--device", "cpu,cpu")
    assert same(tmp_path / "run", whole)
    run_command("verify", tmp_path / "run", "--sample", 2, "--device", "cpu")


@pytest.mark.slow
def test_two_devices_evaluate_as_one(patches, tmp_path):
    model = equicam.load("embedded")
    options = {"methods": ["grad-cam", "grad-cam@random-weights"], "scores": ["eq", "insertion"]}
    one = equicam.evaluate(model, patches, **options, out=tmp_path / "one.parquet")
    options["engine"] = Devices(("cpu", "cpu"))
    two = equicam.evaluate(model, patches, **options, out=tmp_path / "two.parquet")
    assert one.num_rows > 24
    assert repr(two.to_pylist()) == repr(one.to_pylist())  # as text, for NaN is what no NaN equals
    assert repr(pq.read_table(tmp_path / "two.parquet").to_pylist()) == repr(one.to_pylist())


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_what_is_written_stays(patches, whole, tmp_path):
    out = tmp_path / "run"
    command = ("audit", patches, "--out", out, *OPTIONS, "--device", "cpu,cpu")
    process = equicam_process(*command)
    killed = _kill_one(process, "spawn_main", lambda: shards(out))
    said, _ = process.communicate(timeout=120)
    assert killed
    assert process.returncode == 2
    assert "the worker on cpu" in said
    assert "signal 9" in said
    there = {p: p.stat().st_mtime_ns for p in shards(out)}
    assert 1 <= len(there) < 6
    assert not _children_of(process.pid)
    run_command(*command)
    assert same(out, whole)
    assert all(p.stat().st_mtime_ns == then for p, then in there.items())


@pytest.mark.slow
def test_a_worker_says_what_is_wrong_with_it(patches, whole, tmp_path):
    parts = [(0, equicam.images.sources.find_items(patches)[:4])]
    for changed, word in (
        ({"manifest": replace(RunStore(whole).manifest, weights="0" * 64)}, "the run's weights"),
        ({"folder": SharedFolder(str(tmp_path), "manifest.json", "0")}, "a folder that all machines share"),
        ({"folder": replace(job(whole).folder, sha256="0")}, "got another one"),
        ({"manifest": replace(RunStore(whole).manifest, versions=(("torch", "1.0"),))}, "torch was"),
    ):
        with pytest.raises(EquicamError, match=word):
            list(Devices(("cpu", "cpu"), ModelFromName("embedded")).work(job(whole, **changed), parts))


def test_a_part_that_is_there_is_not_written_again(patches, whole):
    path = RunStore(whole).path("items", 0)
    before = path.stat().st_mtime_ns
    items = equicam.images.sources.find_items(patches)[:4]
    work = job(whole)
    work.prepare("cpu")(0, work.decode((0, items)))
    assert path.stat().st_mtime_ns == before


def test_an_image_that_kills_its_opener_is_a_row(patches, whole):
    items = equicam.images.sources.find_items(patches)[:3]
    deadly = replace(equicam.load("embedded"), preprocess=_dies_of_one(np.asarray(Image.open(items[1].path))))
    work = job(whole, preprocessing=deadly)
    found = work.decode((99, items))
    assert [o.reason is None for o in found] == [True, False, True]
    assert found[1].reason == Reason("killed-decoder")
    assert "killed the process" in describe(found[1].reason)


def test_the_visible_boxes_of_a_shard_are_computed_once_per_size(patches, whole, monkeypatch):
    built = []
    monkeypatch.setattr(compute, "VisibleBoxes", lambda model: built.append(1) or VisibleBoxes(model))
    items = equicam.images.sources.find_items(patches)[:4]
    assert len(job(whole).decode((98, items))) == 4
    assert len(built) == 1


def _dies_of_one(pixels):
    usual = equicam.load("embedded").preprocess
    return lambda image: os._exit(9) if (np.asarray(image) == pixels).all() else usual(image)


def test_what_cannot_be_sent_is_refused(patches, whole, tmp_path):
    model = replace(equicam.load("embedded"), preprocess=lambda image: image)
    with pytest.raises(EquicamError, match="that can be pickled"):
        list(Devices(("cpu", "cpu")).work(job_with(model, whole), [(0, []), (1, [])]))


def job_with(model, folder) -> AuditJob:
    return job(folder, model_source=ModelCopy(model), preprocessing=model)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--device", "cpu,cuda:0"), "devices of one kind"),
        (("--device", "cuda:0,cuda:0"), "each once"),
        (recipe("run.actors = 2"), 'try engine = "ray" in the recipe file'),
        (recipe("run.engine = 'spark'"), "local or ray"),
        (recipe("run.engine = 'ray'", "run.address = '10.0.0.1:6379'"), "try RAY_ADDRESS=host:port in the"),
    ],
)
def test_engines_that_make_no_sense_are_refused(patches, tmp_path, options, word):
    said = run_command("audit", patches, "--out", tmp_path / "run", *options, code=2)
    assert word in said
    assert not (tmp_path / "run").exists()


def test_an_engine_needs_files_on_both_sides(patches, tmp_path):
    model = equicam.load("embedded")
    two = Devices(("cpu", "cpu"))
    with pytest.raises(EquicamError, match="a file for the rows"):
        equicam.evaluate(model, patches, engine=two)
    with pytest.raises(EquicamError, match="images in files"):
        equicam.evaluate(model, [Image.new("RGB", (96, 96))], engine=two, out=tmp_path / "rows.parquet")


def test_without_ray_its_extra_is_named(monkeypatch):
    from equicam.engines import ray as cluster

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EquicamError, match=r"pip install 'equicam\[ray\]'"):
        cluster.best_device("somewhere:6379")


IN_ONE_RAY = """
import sys
from pathlib import Path
import ray
ray.init("local", num_cpus=4, **{small!r})
import equicam
from equicam.engines.ray import Cluster
from equicam.engines.worker import ModelFromName

patches, out = sys.argv[1], Path(sys.argv[2])
model = equicam.load("embedded")
equicam.audit("file://" + patches, model, out / "run", views=6, calibrate=6, shard_size=4, engine=Cluster(actors=2, model_source=ModelFromName("embedded")))
assert ray.is_initialized()
try:
    equicam.audit(patches, model, out / "none", engine=Cluster(actors=4))
except equicam.errors.EquicamError as error:
    print(error)
"""


def run_script(script: str, *arguments: object, small: dict = SMALL) -> str:
    command = [sys.executable, "-c", script.format(small=small), *map(str, arguments)]
    done = subprocess.run(command, env=RAY_ENV, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@ray_there
@pytest.mark.slow
def test_ray_writes_the_rows_of_one_process(patches, whole, tmp_path):
    said = run_script(IN_ONE_RAY, patches, tmp_path)
    assert same(tmp_path / "run", whole), "file:// is the folder itself"
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert "more CPUs than actors (4), got 4" in said


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Three hundred synthetic patches."""
    folder = tmp_path_factory.mktemp("many")
    patches = synthetic_patches()
    for i, patch in enumerate([*patches, *(patch.rotate(90) for patch in patches[:100])]):
        patch.save(folder / f"{i:03d}.png")
    return folder


@pytest.fixture(scope="module")
def whole_of_many(many, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run_command("audit", many, "--out", out, *recipe("run.shard_size = 8"))
    return out


@pytest.mark.slow
@ray_there
def test_ray_evaluates_as_one_process(patches, tmp_path):
    told = ("evaluate", patches, "--methods", "grad-cam,equigrad-cam", "--scores", "eq,peum")
    run_command(*told, "--out", tmp_path / "one.parquet")
    run_command(*told, "--out", tmp_path / "ray.parquet", *ON_RAY)
    one, many = (pq.read_table(tmp_path / name).to_pylist() for name in ("one.parquet", "ray.parquet"))
    assert len(one) > 24
    assert repr(many) == repr(one)
    assert not (tmp_path / "ray.parquet.shards").exists()


@pytest.mark.slow
@ray_there
def test_ray_writes_three_hundred_rows_of_one_process(many, whole_of_many, tmp_path):
    out = tmp_path / "run"
    run_command("audit", many, "--out", out, *BY_EIGHT_ON_RAY)
    assert same(out, whole_of_many)


@pytest.mark.slow
@ray_there
def test_an_actor_is_killed_and_no_row_is_missing_or_doubled(many, whole_of_many, tmp_path):
    out = tmp_path / "run"
    process = equicam_process("audit", many, "--out", out, *BY_EIGHT_ON_RAY)
    for goal in (2, 10):
        assert _kill_one(process, "ray::MapWorker", lambda goal=goal: len(shards(out)) >= goal)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert len({row["id"] for row in rows(out)}) == len(rows(out)) == 300
    assert same(out, whole_of_many)


@pytest.mark.slow
@ray_there
def test_the_head_goes_and_comes_back(many, whole_of_many, tmp_path):
    out = tmp_path / "run"
    options = ("audit", many, "--out", out, *recipe(*EIGHT_ON_RAY, "run.address = 'auto'"))
    with _head() as (address, stop):
        process = equicam_process(*options, env=RAY_ENV | {"RAY_ADDRESS": address})
        while len(shards(out)) < 5:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        stop()
        said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    there = len(shards(out))
    assert 5 <= there < 38
    with _head() as (address, _):
        code, said = equicam_command(*options, env=RAY_ENV | {"RAY_ADDRESS": address})
    assert code == 0, said
    assert same(out, whole_of_many)


WAITING = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
import ray
ray.init("local", num_cpus=4, **{small!r})
from equicam.engines.ray import Cluster

@dataclass(frozen=True)
class Slow:
    folder: str
    shard_bytes: int = 4_000_000
    def decode(self, part):
        (Path(self.folder) / f"opened-{{part[0]}}").touch()
        return bytes(self.shard_bytes)
    def decode_ahead(self, parts):
        return map(self.decode, parts)
    def prepare(self, device):
        (Path(self.folder) / f"ready-{{time.monotonic_ns()}}").touch()
        def compute(number, found):
            time.sleep(0.3)
        return compute

folder = Path(sys.argv[1])
most, done = 0, set()
for number in Cluster(actors=1).work(Slow(str(folder)), [(n, []) for n in range(40)]):
    assert number not in done
    done.add(number)
    most = max(most, len(list(folder.glob("opened-*"))) - len(done))
assert len(done) == 40
print("most", most, "ready", len(list(folder.glob("ready-*"))))
"""


@pytest.mark.slow
@ray_there
def test_opening_waits_for_computing_and_the_model_is_loaded_once(tmp_path):
    said = run_script(WAITING, tmp_path).split()
    most, ready = int(said[1]), int(said[3])
    assert most <= 10  # of 40: five parts' worth of memory, and those that were being opened
    assert ready == 1


NODES = """
import os, signal, sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster as Nodes

nodes = Nodes(initialize_head=True, head_node_args={{"num_cpus": 2, **{small!r}}})
lost = nodes.add_node(num_cpus=3, object_store_memory=200_000_000)
import equicam
from equicam.engines.ray import Cluster
from equicam.engines.worker import ModelFromName

source, out = sys.argv[1], Path(sys.argv[2])
gone = []

def lose(done, total, now):
    if now >= 60 and not gone:
        gone.append(now)
        nodes.remove_node(lost, allow_graceful=False)

where = Cluster(address=nodes.address, actors=3, model_source=ModelFromName("embedded"))
equicam.audit(source, equicam.load("embedded"), out, shard_size=8, engine=where, progress=lose)
print("lost at", gone, flush=True)
nodes.shutdown()
"""


@pytest.mark.slow
@ray_there
def test_a_node_is_lost_and_the_others_finish(many, whole_of_many, tmp_path):
    small = {"object_store_memory": 200_000_000, "include_dashboard": False}
    assert "lost at [6" in run_script(NODES, many, tmp_path / "run", small=small)
    assert same(tmp_path / "run", whole_of_many)


@contextlib.contextmanager
def _head():
    """A Ray head of this test's own, in processes that can be killed at once: its address, and what stops it."""
    code = (
        "import ray, time\n"
        f"found = ray.init('local', num_cpus=4, **{SMALL!r})\n"
        "print(found.address_info['gcs_address'], flush=True)\n"
        "time.sleep(3600)\n"
    )
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=RAY_ENV, **piped)

    def stop():
        for pid in [*_children_of(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    try:
        address = ""
        while ":" not in address:
            address = process.stdout.readline().strip()
            assert process.poll() is None
        yield address, stop
    finally:
        stop()


def _children_of(pid: int) -> list[int]:
    """Every process below one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _kill_one(process, title: str, when) -> bool:
    """Kill the first process below another with a word in its title, once it is time."""
    until = time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        if when():
            for pid in _children_of(process.pid):
                with contextlib.suppress(OSError):
                    if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
                        return True
        time.sleep(0.02)
    return False


def test_a_model_that_is_sent_is_a_copy_of_its_own():
    model = equicam.load("embedded")
    copied = ModelCopy.copy_of(model).model.module
    mine, theirs = model.module.state_dict(), copied.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) and mine[k].data_ptr() != theirs[k].data_ptr() for k in mine)
    trainable = ([p.requires_grad for p in one.parameters()] for one in (copied, model.module))
    assert next(trainable) == next(trainable)


class Broken:
    """A job whose own code fails."""

    shard_bytes = 1

    def decode(self, part):
        return part

    def decode_ahead(self, parts):
        return iter(parts)

    def prepare(self, _device):
        raise ZeroDivisionError("by the user's own code")


def test_whatever_ends_a_worker_is_said(monkeypatch):
    monkeypatch.setattr(devices, "end_with_parent", lambda _parent: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with pytest.raises(ZeroDivisionError):
        devices._worker(Broken(), "cpu", 1, [], theirs, os.getpid())
    assert ours.recv() == "ZeroDivisionError: by the user's own code"
