"""A run of a million images, made without a network: how long listing, triage, report, review and verify take, and their memory.

    python benchmarks/million.py --folder /tmp/million              # a million rows: about 4 GB of disk, four minutes
    python benchmarks/million.py --folder /tmp/million --rows 20000 --keep

Images are hard links to a few PNG files. `equicam.audit` lists them and writes the run as always; only the work of the
devices is replaced by two processes that write rows and maps of random numbers with the store's own writer. Every
measurement is of a process of its own: wall time with imports, and peak memory (RSS). For commands that import torch,
which alone takes half a gigabyte, memory is what they take above it.
"""

import argparse
import hashlib
import http.client
import json
import math
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

SHARD_SIZE, VIEWS, GRID = 256, 18, 7
FILES_PER_FOLDER = 1000
MAX_LINKS = 50_000  # of one file; ext4 allows 65,000
CALIBRATION = 1000
TOP = 40  # images that the report shows
PENDING_EVERY = 100  # on resuming, every hundredth shard is missing
WRITERS = 2
REVIEWED, LISTED = 200, 40  # random items, and pages of the list
LIMITS = {
    "listing, s to the first shard": 20,
    "listing, MB": 300,
    "listing a Parquet file, s": 20,
    "listing a Parquet file, MB": 300,
    "resuming, s to the first shard": 20,
    "resuming, MB": 300,
    "triage, s": 60,
    "triage, MB": 2000,
    "report, s": 30,
    "review, s to the first page": 2,
    "review, ms an item, 95th percentile": 150,
    "review, ms a page of the list, 95th percentile": 150,
    "verify of files, MB": 300,
}
"""The most that a figure may be; others are only printed."""
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for images and run")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keep", action="store_true", help="keep the folder, and use the run that is there")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), help="these measurements of a kept run")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        print(json.dumps(STEPS[given.step](given.folder)))
        return
    try:
        found = measure(given.folder, given.rows, given.only or list(STEPS))
    finally:
        if not given.keep:
            for name in ("images", "run"):
                shutil.rmtree(given.folder / name, ignore_errors=True)
            (given.folder / "images.parquet").unlink(missing_ok=True)
    sys.exit(1 if any(figure > LIMITS.get(name, math.inf) for name, figure in found.items()) else 0)


def measure(folder: Path, rows: int, steps: Sequence[str]) -> Figures:
    """Every figure by its name, each step in a process of its own."""
    if not (folder / "images").is_dir():
        link_images(folder / "images", rows)
    found: Figures = {}
    for step in steps:
        command = [sys.executable, __file__, "--folder", folder, "--step", step]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        for name, figure in figures.items():
            most = LIMITS.get(name)
            limit = "" if most is None else f" (at most {most:,}{'' if figure <= most else ': TOO MUCH'})"
            print(f"{name}: {figure:,.1f}{limit}", flush=True)
        found |= figures
    return found


def link_images(folder: Path, rows: int) -> None:
    """As many PNG files as there are rows, in folders of a thousand; most are links."""
    rng = np.random.default_rng(0)
    originals: list[Path] = []
    for i in range(rows):
        path = folder / f"slide-{i // FILES_PER_FOLDER:05d}" / f"tile-{i:07d}.png"
        if i % FILES_PER_FOLDER == 0:
            path.parent.mkdir(parents=True)
        if i % MAX_LINKS < 4:  # four images for each that has all its links
            originals = [] if i % MAX_LINKS == 0 else originals
            coarse = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8))
            coarse.resize((224, 224), Image.Resampling.BICUBIC).save(path)
            originals.append(path)
        else:
            path.hardlink_to(originals[i % len(originals)])


# the run


def writers(on_start: Callable[[], None]) -> Any:
    """Stands for devices: processes that write shards of random rows and maps; `on_start` is called with the first shard."""
    from equicam.engines.devices import Devices

    class Writers(Devices):
        def work(self, job: Any, shards: Sequence[Any]) -> Iterator[tuple[int, Any]]:
            shards[0][1][0]  # the first image is known
            on_start()
            with multiprocessing.get_context("fork").Pool(WRITERS, _start_writer, (job,)) as pool:
                yield from pool.imap_unordered(_write_shard, shards)

    return Writers(("cpu",))


_writer: dict[str, Any] = {}


def _start_writer(job: Any) -> None:
    from equicam.runs.store import RunStore

    _writer.update(job=job, store=RunStore(Path(job.folder.folder)), digests={})


def _write_shard(shard: Any) -> tuple[int, dict[str, str]]:
    number, items = shard
    rows, maps = random_shard(number, list(items), _writer["job"].calibration, _writer["digests"])
    return number, _writer["store"].write_shard(number, rows, maps)


def random_shard(
    number: int, items: Sequence[Any], calibration: frozenset[str], digests: dict[int, str]
) -> tuple[pa.Table, pa.Table]:
    """Rows and maps of a shard as an audit writes them; one image of a thousand is bad, one of two hundred blank."""
    from equicam.runs.store import ITEMS, MAPS

    rng, n = np.random.default_rng(number), len(items)
    ids, stats = [item.id for item in items], [item.path.stat() for item in items]
    for item, stat in zip(items, stats, strict=True):
        if stat.st_ino not in digests:
            digests[stat.st_ino] = hashlib.sha256(item.path.read_bytes()).hexdigest()
    bad, blank = rng.random(n) < 1e-3, rng.random(n) < 5e-3
    steady = rng.beta(5, 2, n)[:, None]
    by_view = np.clip(steady + 0.15 * rng.standard_normal((n, VIEWS)), -1, 1).astype(np.float32)
    by_view[:, 0] = 1
    target = rng.integers(0, 10, n)
    flips = rng.random((n, VIEWS)) > steady + 0.2
    flips[:, 0] = False
    confidence = np.where(flips, 0.3, 0.5 + rng.random((n, VIEWS)) / 2).astype(np.float32)
    mean = by_view[:, 1:].mean(1).astype(np.float64)
    words = np.select([blank, mean > 0.75, mean < 0.6], ["cannot say", "steady", "unsteady"], "cannot say")
    codes = np.select([blank, mean > 0.75, mean < 0.6], ["blank", "follows", "moves"], "too-close")
    reason = json.dumps({"error": "EquicamError", "message": "a file that ends too early"})
    eq = [float(v) if one in calibration else None for one, v in zip(ids, mean - 0.1, strict=True)]
    columns: dict[str, Any] = {
        "id": ids,
        "path": [str(item.path) for item in items],
        "sha256": [digests[stat.st_ino] for stat in stats],
        "bytes": [stat.st_size for stat in stats],
        "mtime_ns": [stat.st_mtime_ns for stat in stats],
        "width": np.full(n, 224),
        "height": np.full(n, 224),
        "input_box": _lists(np.tile(np.float32([0, 0, 224, 224]), (n, 1))),
        "label": [item.label for item in items],
        "target": target,
        "confidence": confidence[:, 0],
        "top5": _lists((target[:, None] + np.arange(5, dtype=np.int32)).astype(np.int32) % 10),
        "top5_confidence": _lists(np.repeat(confidence[:, :1], 5, 1)),
        "peum_score": rng.gamma(2, 0.01, n),
        "stability": mean,
        "stability_by_view": _lists(by_view),
        "flip_rate": flips.mean(1),
        "views_kept": np.full(n, VIEWS),
        "view_confidence": _lists(confidence),
        "view_top1": _lists(np.where(flips, (target[:, None] + 1) % 10, target[:, None]).astype(np.int32)),
        "view_agreement": _lists(by_view),
        "flags": [["blank"] if one else ["edge"] if i % 20 == 0 else [] for i, one in enumerate(blank)],
        "steadiness": words,
        "steadiness_reason": codes,
        "eq": eq,
        "status": np.where(bad, "bad", "ok"),
        "reason": ["unreadable" if one else None for one in bad],
        "reason_values": [reason if one else None for one in bad],
        "seconds": np.full(n, 0.001),
    }
    facts = {
        "id",
        "path",
        "sha256",
        "bytes",
        "mtime_ns",
        "label",
        "status",
        "reason",
        "reason_values",
        "seconds",
    }
    arrays = []
    for field in ITEMS:
        value = columns.get(field.name)
        if value is None:
            arrays.append(pa.nulls(n, field.type))
            continue
        array = value if isinstance(value, pa.Array) else pa.array(value).cast(field.type)
        empty = pa.scalar(None, field.type)
        arrays.append(array if field.name in facts else pc.if_else(pa.array(bad), empty, array))
    good = np.flatnonzero(~bad)
    maps = {
        "id": [ids[i] for i in good],
        "height": np.full(len(good), GRID),
        "width": np.full(len(good), GRID),
    }
    for name, planes in (("map", 1), ("peum", 1), ("view_maps", VIEWS)):
        values = rng.random((len(good), planes * GRID * GRID), dtype=np.float32).astype(np.float16)
        maps[name], maps[f"{name}_scale"] = _lists(values), np.ones(len(good))
    stored = [m if isinstance(m, pa.Array) else pa.array(m).cast(MAPS.field(k).type) for k, m in maps.items()]
    return pa.Table.from_arrays(arrays, schema=ITEMS), pa.Table.from_arrays(stored, schema=MAPS)


def _lists(values: np.ndarray) -> pa.Array:
    """The rows of a matrix as lists."""
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))


# the measurements: each is the whole work of a process


class Clock:
    """Wall time, processor time and peak memory (RSS) from here on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self.before_mb, self.start = _status_mb("VmRSS"), time.perf_counter()
        self.cpu = time.process_time()

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return time.perf_counter() - self.start

    def figures(self, name: str, *, whole: bool = True) -> Figures:
        """Time and memory; `whole` counts the memory that was there before, too."""
        peak = _status_mb("VmHWM") - (0 if whole else self.before_mb)
        cpu = time.process_time() - self.cpu
        return {f"{name}, s": self.seconds, f"{name}, s of processor time": cpu, f"{name}, MB": peak}


def _status_mb(name: str, process: int | str = "self") -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) / 1024


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def audit(folder: Path, name: str) -> Figures:
    """The driver of an audit."""
    import equicam
    import equicam.audit.audit  # torch, before the clock starts

    model = equicam.load("embedded")
    found: Figures = {}
    clock = Clock()
    equicam.audit(
        folder / "images", model, folder / "run", views=VIEWS, calibrate=CALIBRATION, shard_size=SHARD_SIZE,
        engine=writers(lambda: found.update({f"{name}, s to the first shard": clock.seconds})),
    )  # fmt: skip
    return found | clock.figures(name, whole=False)


def list_images(folder: Path) -> Figures:
    """A new run of a folder."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    found = audit(folder, "listing")
    size = sum(path.stat().st_size for path in (folder / "run").rglob("*.parquet"))
    return found | {"stored, kB an image": size / 1000 / _rows(folder)}


def list_file(folder: Path) -> Figures:
    """The same images by a Parquet file, with a label and a box each."""
    from equicam.images.sources import list_source

    paths = pq.read_table(folder / "run" / "sample.parquet", columns=["path", "label"])
    boxes = pa.array(["10 20 110 120"] * len(paths))
    pq.write_table(paths.append_column("boxes", boxes), folder / "images.parquet")
    del paths, boxes
    clock = Clock()
    items = list_source(folder / "images.parquet").in_scan_order()
    items.digest()
    assert len(items) == _rows(folder)
    return clock.figures("listing a Parquet file", whole=False)


def _rows(folder: Path) -> int:
    return int(pq.read_metadata(folder / "run" / "sample.parquet").num_rows)


def resume(folder: Path) -> Figures:
    """A run of which some shards are missing."""
    for number in range(0, len(list((folder / "run" / "items").iterdir())), PENDING_EVERY):
        for kind in ("items", "maps"):
            (folder / "run" / kind / f"shard-{number:06d}.parquet").unlink()
    return audit(folder, "resuming")


def triage(folder: Path) -> Figures:
    """`Run.triage` with its defaults: a tenth of the images is dealt."""
    clock = Clock()
    import equicam

    equicam.open_run(folder / "run").triage()
    return clock.figures("triage")


def report(folder: Path) -> Figures:
    """`Run.report` with its defaults."""
    clock = Clock()
    import equicam

    equicam.open_run(folder / "run").report(TOP)
    return clock.figures("report")


def verify(folder: Path) -> Figures:
    """`Run.verify` of files, log and rows."""
    import equicam
    import equicam.audit.verify

    clock = Clock()
    found = equicam.open_run(folder / "run").verify(sample=0)
    assert found.ok, found.problems[:3]
    return clock.figures("verify of files", whole=False)


class Browser:
    """A reviewer's requests to a server."""

    def __init__(self, link: str) -> None:
        address, self.start = re.findall(r"http://([^/]+)(/\S*)", link)[0]
        self.http = http.client.HTTPConnection(address, timeout=120)
        self.headers: dict[str, str] = {}

    def get(self, path: str) -> bytes:
        """The body of an answer."""
        self.http.request("GET", path, headers=self.headers)
        answer = self.http.getresponse()
        data = answer.read()
        if answer.status == 303 and (cookies := answer.headers.get_all("set-cookie")):
            self.headers["cookie"] = "; ".join(one.partition(";")[0] for one in cookies)
            return self.get(answer.getheader("location") or "/")
        assert answer.status == 200, (path, answer.status, data[:200])
        return data


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[Browser, int]]:
    """A browser of `equicam review`, and the process."""
    command = [sys.executable, "-m", "equicam", "review", str(folder / "run"), "--no-browser", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield Browser(next(line for line in process.stdout if "http:" in line)), process.pid
        finally:
            process.terminate()


def review(folder: Path) -> Figures:
    """The first page as reviewers see it; then, without blinding, random items with their images and pages of the list."""
    start = time.perf_counter()
    with server(folder, "--reviewer", "ana") as (browser, process):
        browser.get(browser.start)
        first, cpu = time.perf_counter() - start, _cpu_seconds(process)
    rng = np.random.default_rng(0)
    lists, items = [], []
    keys: list[str] = []
    with server(folder, "--reviewer", "ana", "--no-blinding") as (browser, process):
        browser.get(browser.start)
        total = json.loads(browser.get("/api/queue?limit=1"))["matching"]
        for offset in rng.integers(0, total, LISTED).tolist():
            start = time.perf_counter()
            found = json.loads(browser.get(f"/api/queue?offset={offset}&limit=60"))["items"]
            lists.append(time.perf_counter() - start)
            keys += [item["key"] for item in found]
        for key in rng.choice(keys, REVIEWED).tolist():
            start = time.perf_counter()
            for path in (f"/item/{key}", f"/image/{key}/input", f"/image/{key}/map"):
                browser.get(path)
            items.append(time.perf_counter() - start)
        memory = _status_mb("VmHWM", process)
    return {
        "review, s to the first page": first,
        "review, s of processor time to the first page": cpu,
        "review, ms an item, 95th percentile": 1000 * statistics.quantiles(items, n=20)[-1],
        "review, ms of the slowest item": 1000 * max(items),
        "review, ms a page of the list, 95th percentile": 1000 * statistics.quantiles(lists, n=20)[-1],
        "review, MB": memory,
    }


STEPS = {
    "list": list_images,
    "list-file": list_file,
    "resume": resume,
    "triage": triage,
    "report": report,
    "review": review,
    "verify": verify,
}

if __name__ == "__main__":
    main()
