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

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import equicam
from equicam.audit import compute
from equicam.audit.compute import AuditJob
from equicam.demo import synthetic_patches
from equicam.engines import devices, ray
from equicam.engines.devices import Devices
from equicam.engines.worker import ModelCopy, ModelFromName, SharedFolder
from equicam.errors import EquicamError
from equicam.images.sources import find_items
from equicam.models.images import VisibleBoxes
from equicam.runs.store import RunStore
from tests.audit.conftest import ENV, OPTIONS, equicam_process, run_command
from tests.audit.test_run import rows, same
from tests.conftest import recipe

SMALL = {"object_store_memory": 300_000_000, "include_dashboard": False, "log_to_driver": False}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# a cluster of the tests' own, which nobody else can use
RAY_ENV = ENV | TOKEN | {"RAY_USAGE_STATS_ENABLED": "0"}
HAS_RAY = importlib.util.find_spec("ray") is not None
ray_there = pytest.mark.skipif(not HAS_RAY, reason="equicam[ray] is not installed")
ON_RAY = recipe("run.engine = 'ray'", "run.actors = 2")
EIGHT_ON_RAY = ("run.engine = 'ray'", "run.actors = 2", "run.shard_size = 8")
BY_EIGHT_ON_RAY = recipe(*EIGHT_ON_RAY)


@pytest.fixture
def model():
    return equicam.load("embedded")


@pytest.fixture(scope="module")
def items(patches):
    return find_items(patches)


def shards(run: Path) -> list[Path]:
    return list(run.glob("items/*.parquet"))


def job(run: Path, **changed) -> AuditJob:
    source = ModelFromName("embedded")
    folder, manifest = SharedFolder.at(run / "manifest.json"), RunStore(run).manifest
    preprocessing = source.preprocessing_only(equicam.load("embedded"))
    options = {"workers": 1, "image_bytes": 0, "model_source": source, "preprocessing": preprocessing}
    return AuditJob(folder=folder, manifest=manifest, calibration=frozenset(), **options | changed)


@pytest.mark.slow
def test_two_devices_write_the_rows_of_one(patches, whole, tmp_path):
    run_command("audit", patches, "--out", tmp_path / "run", *OPTIONS, "--device", "cpu,cpu")
    assert same(tmp_path / "run", whole)
    run_command("verify", tmp_path / "run", "--sample", 2, "--device", "cpu")


@pytest.mark.slow
def test_two_devices_evaluate_as_one(patches, model, tmp_path):
    options = {"methods": ["grad-cam", "grad-cam@random-weights"], "scores": ["eq", "insertion"]}
    one = equicam.evaluate(model, patches, **options, out=tmp_path / "one.parquet")
    options["engine"] = Devices(("cpu", "cpu"))
    two = equicam.evaluate(model, patches, **options, out=tmp_path / "two.parquet")
    assert one.num_rows > 24
    for other in (two, pq.read_table(tmp_path / "two.parquet")):
        assert repr(other.to_pylist()) == repr(one.to_pylist())  # as text, for NaN is what no NaN equals


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_what_is_written_stays(patches, whole, tmp_path):
    command = ("audit", patches, "--out", out := tmp_path / "run", *OPTIONS, "--device", "cpu,cpu")
    process = equicam_process(*command)
    assert _kill_one(process, "spawn_main", lambda: shards(out))
    said, _ = process.communicate(timeout=120)
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
def test_a_worker_says_what_is_wrong_with_it(items, whole, tmp_path):
    manifest, folder = RunStore(whole).manifest, job(whole).folder
    for changed, word in (
        ({"manifest": replace(manifest, weights="0" * 64)}, "the run's weights"),
        ({"folder": SharedFolder(str(tmp_path), "manifest.json", "0")}, "a folder that all machines share"),
        ({"folder": replace(folder, sha256="0")}, "got another one"),
        ({"manifest": replace(manifest, versions=(("torch", "1.0"),))}, "torch was"),
    ):
        work = replace(job(whole), **changed)
        with pytest.raises(EquicamError, match=word):
            list(Devices(("cpu", "cpu"), ModelFromName("embedded")).work(work, [(0, items[:4])]))


def test_a_part_that_is_there_is_not_written_again(items, whole):
    path, work = RunStore(whole).path("items", 0), job(whole)
    before = path.stat().st_mtime_ns
    work.prepare("cpu")(0, work.decode((0, items[:4])))
    assert path.stat().st_mtime_ns == before


def test_the_visible_boxes_of_a_shard_are_computed_once_per_size(items, whole, monkeypatch):
    built = []
    monkeypatch.setattr(compute, "VisibleBoxes", lambda model: built.append(1) or VisibleBoxes(model))
    assert len(job(whole).decode((98, items[:4]))) == 4
    assert len(built) == 1


def test_what_cannot_be_sent_is_refused(model, whole):
    unsendable = replace(model, preprocess=lambda image: image)
    work = job(whole, model_source=ModelCopy(unsendable), preprocessing=unsendable)
    with pytest.raises(EquicamError, match="that can be pickled"):
        list(Devices(("cpu", "cpu")).work(work, [(0, []), (1, [])]))


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
    assert word in run_command("audit", patches, "--out", tmp_path / "run", *options, code=2)
    assert not (tmp_path / "run").exists()


def test_an_engine_needs_files_on_both_sides(patches, model, tmp_path):
    two = Devices(("cpu", "cpu"))
    with pytest.raises(EquicamError, match="a file for the rows"):
        equicam.evaluate(model, patches, engine=two)
    with pytest.raises(EquicamError, match="images in files"):
        equicam.evaluate(model, [Image.new("RGB", (96, 96))], engine=two, out=tmp_path / "rows.parquet")


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EquicamError, match=r"pip install 'equicam\[ray\]'"):
        ray.best_device("somewhere:6379")


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
    folder, patches = tmp_path_factory.mktemp("many"), synthetic_patches()
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
@pytest.mark.parametrize("goals", [(), (2, 10)], ids=["undisturbed", "killed"])
def test_actors_are_killed_and_no_row_is_missing_or_doubled(many, whole_of_many, tmp_path, goals):
    process = equicam_process("audit", many, "--out", out := tmp_path / "run", *BY_EIGHT_ON_RAY)
    for goal in goals:
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
        process.communicate(timeout=300)
    assert process.returncode != 0
    assert 5 <= len(shards(out)) < 38
    with _head() as (address, _):
        run_command(*options, env=RAY_ENV | {"RAY_ADDRESS": address})
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
    _, most, _, ready = run_script(WAITING, tmp_path).split()
    assert int(most) <= 10  # of 40: five parts' worth of memory, and those that were being opened
    assert int(ready) == 1


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


HEAD = """
import ray, time
found = ray.init("local", num_cpus=4, **{small!r})
print(found.address_info["gcs_address"], flush=True)
time.sleep(3600)
"""


@contextlib.contextmanager
def _head():
    """A Ray head of this test's own, in processes that can be killed at once: its address, and what stops it."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HEAD.format(small=SMALL)], env=RAY_ENV, **piped)

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


def test_a_model_that_is_sent_is_a_copy_of_its_own(model):
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
