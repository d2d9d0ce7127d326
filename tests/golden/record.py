"""Record what the program does, so that a redesign can be compared with it.

    python tests/golden/record.py            compare with the recording, and print each difference by name
    python tests/golden/record.py --fast     the part of it that takes seconds
    python tests/golden/record.py --write    record again

The program is reached through its public functions, its commands (commands.txt) and HTTP, on inputs made from seeds.
EQUICAM_PICTURES names a folder of real files, of which digests are kept; without it they are left out. Other processors
and libraries round and encode in other ways: there, only explanations are compared.
"""

import contextlib
import json
import lzma
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pyarrow.parquet as pq
import pydicom
import tifffile
import torch
from PIL import Image
from pyarrow.csv import read_csv
from typer.testing import CliRunner

sys.path.insert(0, str(ROOT := Path(__file__).parents[2]))

# What a redesign may rename, move or take away stands here, in values.py, networks.py and commands.txt.
import equicam
from equicam import Recipe, Views
from equicam.cli.app import app
from equicam.images.items import Item, load_item
from equicam.images.limited import end_idle
from equicam.models.libraries import ZeroShot
from scripts.synthetic import draw
from tests.conftest import Cnn, Vit, pictures, seeded
from tests.golden.values import RENAMED, differences, digest, left_out, plain, project
from tests.hostile.fuzz import make_image, make_source, open_source
from tests.rasters.conftest import scene, write_geotiff, write_pyramid
from tests.unit.test_dicom import written as write_dicom

APPS = {"reproduce": app}  # of commands that are not equicam's own
KEY = "review.key"  # of a run
EMPTY = "PatientBirthDate PatientSex AccessionNumber StudyID StudyDate StudyTime ReferringPhysicianName"
IMAGES = "input original map thumb thumb-plain presented peum strip view-1 thumb-1"
FIELDS = """map raw peum layer_map view_maps probabilities target output confidence peum_score stability
    stability_by_view view_confidence view_top1 view_flips view_kept"""
HERE = Path(__file__).parent
FILE = HERE / "golden.json.xz"
PICTURES = os.environ.get("EQUICAM_PICTURES")
MACHINE = [torch.backends.cpu.get_cpu_capability(), torch.__version__, Image.__version__]
Values = Iterator[tuple[str, Any]]
RECIPES = {
    "one": "[run]\nworkers = 1",
    "patches": "[run]\nworkers = 1\ncalibrate = 8\nshard_size = 16",
    "steady": "[run]\nworkers = 1\ncalibrate = 6",
    "blank": "[run]\nworkers = 1\n[recipe]\ntau = 0.5",
    "slide": "[run]\nworkers = 1\n[tiling]\ntissue = 0.05",
    "map": "[run]\nworkers = 1\n[tiling]\nscale = 10000",
    "real": "[run]\nworkers = 1\n[tiling]\nscale = 65535",
    "scans": "[run]\nworkers = 1\n[preprocessing]\nvoi = [500, 2500]",
}
REAL = {
    "": "--recipe one.toml",
    "--tile 96": "--tile 96 --recipe one.toml",
    "--tile 96 --bands 1,2,3 --scale 65535": "--tile 96 --bands 1,2,3 --recipe real.toml",
}
"""The options of audits of real rasters, by their names in the recording."""


# 1. Explanations of every method, in float64.

SETTINGS: dict[str, dict[str, Any]] = {
    "own": {},
    "paper": {"recipe": Recipe(protocol="paper")},
    "4 views": {"views": 4},
    "window": {"views": 6, "window": 32},
    **{f"{count} views": {"views": count} for count in (7, 12, 18)},
    "dihedral": {"views": Views.dihedral(8)},
    "scales": {"views": Views.scales(0.8, 1, 1.25)},
    "shifts": {"views": Views.shifts((0, 0), (0.1, 0), (0, -0.1))},
    "turns and scales": {"views": Views.evenly(3) * Views.scales(1, 1.2)},
    "without the presented view": {"views": Views([30, 75, 160])},
    "reflect": {"views": Views.scales(1, 0.8), "recipe": Recipe(fill="reflect")},
    "zeros": {"views": 6, "recipe": Recipe(fill="zeros")},
    "coverage": {"views": 6, "recipe": Recipe(fill="coverage")},
    "classes": {"views": 4, "target": [0, 3]},
    "tau": {"recipe": Recipe(tau=0.4)},
    "gamma": {"recipe": Recipe(gamma=2.0)},
}
FEW = ("own", "paper", "4 views", "window")  # of --fast, and of costly methods
COSTLY = {"rise": ("own",), "rise-400": FEW, "opti-cam": FEW, "smooth-grad-cam++": FEW}


def record_explain(fast: bool) -> Values:
    x, larger, texts = pictures(2), pictures(2, 48, 48, seed=3), torch.eye(5).double() + 0.3
    clip = ZeroShot(seeded(Vit), texts / texts.norm(dim=1), scale=torch.tensor(12.0).double())
    cnn, layer = equicam.wrap(seeded(Cnn), layer="trunk"), "blocks.1.norm1"
    vit, clip = equicam.wrap(seeded(Vit), layer=layer), equicam.wrap(clip, layer=f"vision.{layer}")
    for kind, model in {"cnn": cnn, "vit": vit, "clip": clip}.items():
        for method in equicam.methods():
            settings = COSTLY.get(method, FEW if fast else SETTINGS)
            for name in settings if not (fast and method in COSTLY) else ():
                call = partial(equicam.explain, model, larger if name == "window" else x, method=method)
                yield f"{kind}/{method}/{name}", explained(partial(call, **SETTINGS[name]))

    def gradient(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        images = images.detach().requires_grad_()
        chosen = cnn.module(images).gather(1, target[:, None]).sum()
        return torch.autograd.grad(chosen, images)[0].abs().sum(1)

    yield "a function of the caller's", explained(partial(equicam.equivariant(gradient, 6), x, 2))
    yield "a function as target", explained(lambda: equicam.explain(cnn, x, target=lambda y: y[:, 1].exp()))
    yield "not square", explained(lambda: equicam.explain(cnn, pictures(2, 30, 44, seed=5)))


def explained(call: Callable[[], Any]) -> Any:
    try:
        found = call()
    except equicam.EquicamError:
        return "refused"
    for flags, values in zip(found.flags, found.map, strict=True):
        assert values.std() > 0.01 or flags & {"blank", "constant"}, "a flat map without a flag"
    tensors = {RENAMED.get(name, name): getattr(found, name) for name in FIELDS.split()}
    kept = {name: project(one.detach(), 12) for name, one in tensors.items() if one is not None}
    words = [[one.word, one.reason.code] for one in found.steadiness]
    return kept | {"words": words, "flags": [sorted(flags) for flags in found.flags]}


# 2 and 3. Commands, their documents, and the files that they write into a folder of their own.


def write_inputs(fast: bool) -> None:
    for folder in ("images/glands", "images/stroma", "damaged", "slides", "scans"):
        Path(folder).mkdir(parents=True)
    write_recipes()
    for i in range(32):
        Image.fromarray(draw(i, seed=3).image).save(f"images/{('glands', 'stroma')[i % 2]}/{i:02}.png")
    for i in range(60 if fast else 400):
        kind, data = make_image(39, i)
        for folder in ("damaged", "images")[: 1 + (i < 16)]:
            Path(f"{folder}/{i:03}.{kind.replace('mpo', 'jpg')}").write_bytes(data)
    write_pyramid(Path("slides/slide.ome.tif"), scene(seed=4, size=(500, 620)), ome=True)
    write_geotiff(Path("map.tif"), scene(4, "uint16", seed=5, size=(380, 420)), nodata=0, overviews=(2,))
    values = scene(3, "uint16", seed=6, size=(96, 96)) // 3
    twelve, axes = {"BitsStored": 12, "HighBit": 11}, {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
    axes |= {"ImagePositionPatient": [0, 0, 1], "PixelSpacing": [1, 1], "SliceThickness": 1, "Modality": "CT"}
    axes |= {"StudyInstanceUID": "1.2.4", "SeriesInstanceUID": "1.2.5", "FrameOfReferenceUID": "1.2.6"}
    write_dicom(Path("scans/one.dcm"), values[0], **twelve, **axes, **dict.fromkeys(EMPTY.split(), ""))
    write_dicom(Path("scans/two.dcm"), values[1:], **twelve)
    write_dicom(Path("scans/cut.dcm"), values[0], PixelData=b"cut off!")


def write_recipes() -> None:
    for name, text in RECIPES.items():
        Path(f"{name}.toml").write_text(text)


def record_commands(fast: bool) -> Values:
    lines = (HERE / "commands.txt").read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs(fast)
        yield from ((str(path), opened(path)) for path in sorted(Path("damaged").iterdir()))
        known = written()
        for line in filter(None, lines[: lines.index("") if fast else None]):
            name, command = line.format(HERE=HERE, ROOT=ROOT).split(": ")
            yield from session(command) if name == "review" else [(name, ask(command))]
            for path, _ in sorted((now := written()) - known):
                yield f"{name}: {RENAMED.get(path, path)}", plain(KINDS[Path(path).suffix](Path(path)))
            known = now


def written() -> set[tuple[str, int]]:
    """The files whose content is recorded, with their times; not the plots of the paper's page."""
    found = (path for path in Path().rglob("*.*") if path.suffix in KINDS and path.parts[0] != "page")
    return {(str(path), path.stat().st_mtime_ns) for path in found if path.name not in left_out()}


def ask(command: str) -> Any:
    """The exit code of a command, and its document."""
    end_idle()  # each command opens files in new processes, whatever was opened before
    words = [*command.split(), "--json", "--quiet"]
    result = CliRunner().invoke(APPS.get(words[0], app), words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    if words[0] == "audit" and Path(words[3]).is_dir():
        Path(words[3], KEY).write_bytes(bytes(range(32)))  # what is drawn at random is drawn from it
    document = plain(json.loads(result.stdout)) if result.stdout else {}
    if words[0] == "doctor":
        document["findings"] = [one["name"] for one in document["findings"]]
    return {"exit": result.exit_code} | document


def read_events(path: Path) -> Any:
    with contextlib.closing(sqlite3.connect(path)) as log:
        rows = log.execute("SELECT kind, payload FROM events ORDER BY number").fetchall()
    return [[kind, json.loads(text)] for kind, text in rows]


def read_columns(path: Path) -> Any:
    """The columns of a table, those of maps as projections, whatever the order of rows."""
    rows = sorted(pq.read_table(path).to_pylist(), key=lambda row: str([*row.values()][:6]))
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        column = [row[name] for row in rows]
        is_map = any(isinstance(one, list) and len(one) > 99 for one in column)
        columns[name] = project(np.concatenate(column)) if is_map else column
    return columns | {"content": [one and one[:12] for one in columns.get("sha256", ())]}


def read_features(path: Path) -> Any:
    """The features of an export; of a blind one, verdicts are given to them."""
    found, given = (json.loads(path.read_text()) for _ in range(2))
    for one in given["features"] if "blind" in path.name else ():
        one["properties"]["classification"] = {"name": "Unsure"}
        Path("given.geojson").write_text(json.dumps(given))
    return found


KINDS: dict[str, Callable[[Path], Any]] = {
    ".parquet": read_columns,
    ".sqlite": read_events,
    ".geojson": read_features,
    ".json": lambda path: json.loads(path.read_text()),
    ".csv": lambda path: read_csv(path).to_pylist(),
    ".tif": lambda path: project(tifffile.imread(path)),
    ".png": lambda path: project(np.asarray(Image.open(path))),
    ".dcm": lambda path: project(np.frombuffer(pydicom.dcmread(path).FloatPixelData, np.float32)),
}


# 4. A review over HTTP.


class Browser(httpx2.Client):
    """The browser of a reviewer who opened a link."""

    def __init__(self, link: str) -> None:
        super().__init__(base_url=link[: link.index("/", 8)], follow_redirects=True, trust_env=False)
        self.get(link)
        self.secret = re.search(r'data-csrf="([^"]+)"', self.get("/reviewer").text)[1]

    def ask(self, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
        """Status, kind and content of an answer; of a page or image its digest."""
        sent = {"content-type": "application/json", "x-equicam-csrf": self.secret} | headers
        answer = self.get(path) if body is None else self.post(path, content=json.dumps(body), headers=sent)
        kind = answer.headers["content-type"]
        if answer.is_error:
            return {"status": answer.status_code, "kind": kind}
        # without the secret of the session, and the name of the signal, which may become another
        data = re.sub(b"(in)?stability", b"", answer.content.replace(self.secret.encode(), b""))
        content = plain(answer.json()) if "json" in kind else [len(data), digest(data)]
        return {"status": 200, "kind": kind, "cached": answer.headers["cache-control"], "content": content}


def session(command: str) -> Values:
    words = [sys.executable, "-m", "equicam", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            links = islice((one for line in server.stdout for one in re.findall(r"http://\S+", line)), 2)
            yield from ((f"review: {name}", value) for name, value in review(*map(Browser, links)))
        finally:
            server.terminate()


def review(ana: Browser, bo: Browser) -> Values:
    """What two reviewers of a blinded queue may see, before and after a verdict, and what is refused."""
    yield "queue", (queue := ana.ask("/api/queue?limit=200"))
    keys = [one["key"] for one in queue["content"]["items"]]
    verdict = {"key": keys[0], "verdict": "supports", "previous_event": 0, "mark": "mark-0001"}
    item = f"/api/item/{keys[0]}"
    pages = ["/", "/reviewer", "/api/progress", "/image/scale/scale", item.removeprefix("/api"), item]
    pages += [f"/image/{keys[0]}/{kind}" for kind in IMAGES.split()]
    yield from ((f"blinded {path}", ana.ask(path)) for path in pages)
    forged = {"x-equicam-csrf": "x", "origin": "http://a.org", "host": "a.org", "content-type": "text/plain"}
    for name, text in forged.items():
        yield f"forged {name}", ana.ask("/api/verdict", verdict, **{name: text})
    for name, text in {"verdict": "perhaps", "key": "0" * 20, "who": "bo", "reason": "x" * 20_000}.items():
        yield f"wrong {name}", ana.ask("/api/verdict", verdict | {name: text})
    yield "verdict", (first := ana.ask("/api/verdict", verdict))
    yield "sent again", ana.ask("/api/verdict", verdict)
    other = verdict | {"verdict": "unsure", "mark": "mark-0002", "reason": "pale"}
    yield "stale", ana.ask("/api/verdict", other)
    yield "changed", ana.ask("/api/verdict", other | {"previous_event": first["content"]["number"]})
    yield "note", ana.ask("/api/note", {"key": keys[0], "text": "see slide 4", "mark": "note-0001"})
    yield from ((f"revealed {path}", ana.ask(path)) for path in pages[5:])
    yield from ((f"still blinded {path}", bo.ask(path)) for path in pages[4:])
    for i, key in enumerate(keys[1:]):
        word = ("supports", "shortcut", "wrong-region", "unsure", "second-reviewer")[i % 5]
        body = {"key": key, "verdict": word, "previous_event": 0, "mark": f"mark-1{i:03}"}
        yield f"verdict {i}", (bo if i == 7 else ana).ask("/api/verdict", body)
    for path in ("/api/progress", item, "/api/queue?verdict=unsure&limit=3"):
        yield f"after all {path}", ana.ask(path)
    ana.cookies.clear()
    yield "without a cookie", ana.ask("/api/queue")


# 5. Damaged images, lists and rasters, and real files.


def opened(path: Path) -> str:
    """The orientation and the pixels of an image, or that it is refused."""
    try:
        found = load_item(Item(path.name, path)).upright
    except equicam.EquicamError:
        return "refused"
    return f"{found.orientation} {found.image.width}×{found.image.height} {digest(found.image.tobytes())}"


def record_sources(fast: bool) -> Values:
    for number in range(0 if fast else 150):
        end_idle()
        with tempfile.TemporaryDirectory() as folder:
            kind, found = make_source(39, number, Path(folder)), "read"
            try:
                open_source(kind, Path(folder))
            except equicam.EquicamError:
                found = "refused"
            yield f"{number} {kind}", found


def record_real(fast: bool) -> Values:
    """Digests of real pictures, a list for each folder, and of real rasters and their windows."""
    root = Path("/nowhere" if fast or not PICTURES else PICTURES)
    for folder in sorted({path.parent for path in root.glob("*/images/**/*.jpg")}):
        yield str(folder.relative_to(root)), [opened(path) for path in sorted(folder.glob("*.jpg"))]
    for path in sorted(root.glob("rasters/*")):
        for options, recipe in REAL.items():
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                write_recipes()
                yield f"{path.name} {options}", ask(f"audit {path} --out run --views 2 {recipe}")
                for shard in sorted(Path().glob("run/items/*")):
                    items = pq.read_table(shard).select(["id", "status", "reason", "flags", "sha256"])
                    yield f"{path.name} {options}: {shard.name}", digest(str(items.to_pylist()).encode())


def main(fast: bool, write: bool) -> int:
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    now: dict[str, Any] = {}
    for record in (record_explain, record_commands, record_sources, record_real):
        part, before = record.__name__.removeprefix("record_"), len(now)
        now |= {f"{part}/{name}": value for name, value in record(fast)}
        print(f"{part}: {len(now) - before} values", flush=True)
    if write:
        FILE.write_bytes(lzma.compress(json.dumps(now | {"machine": MACHINE}).encode()))
        return 0
    now, was = json.loads(json.dumps(now)), json.loads(lzma.decompress(FILE.read_bytes()))
    parts = ["explain", "commands", "sources", "real"] if was.pop("machine") == MACHINE else ["explain"]
    found = []
    for name in {**was, **now}:
        part = name.partition("/")[0]
        if name not in was and part == "explain":  # of a new method
            continue
        if part in parts and (name in now or not (fast or (part == "real" and not PICTURES))):
            before, after = ({name: one[name]} if name in one else {} for one in (was, now))
            found += differences("", before, after, 1e-9 if part == "explain" else 1e-5)
    print(*found or ["no differences"], f"compared: {', '.join(parts)}", sep="\n")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main("--fast" in sys.argv, "--write" in sys.argv))
