"""A finished run on disk, a triage of it and a reader of pages, made without a model: drawn patches, plausible views, every kind of trouble."""

import hashlib
from dataclasses import dataclass
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps
from scipy import ndimage

from equicam.demo import synthetic_patches
from equicam.images.files import file_digest
from equicam.images.items import Item
from equicam.reasons import Reason
from equicam.recipe import Recipe
from equicam.runs.log import Log
from equicam.runs.manifest import Manifest
from equicam.runs.store import ITEMS, MAPS, RunStore, StoredMaps
from equicam.steadiness import judge_row

ANGLES = tuple(20.0 * t for t in range(18))
HOSTILE = (
    "<script>alert(1)</script>.png",
    '"><img src=x onerror=alert(1)>.png',
    "two\nlines\tand\x1b[31m red\x00.png",
    "invoice\u202egnp.exe",
    "🧬 патч ‮نص עברית.png",
    "x" * 250,
    "javascript:alert(1)//{{ 7*7 }}{% raw %}",
    "Z" + "\u0301" * 60 + "algo.png",
)
MISSING, CHANGED, BLANK, UNREADABLE = (f"slide-0{n}.png" for n in ("7/0031", "7/0032", "2/0007", "9/0001"))
KINDS = {"id": "string", "arm": "string", "rank": "int32", "place": "int32", "represents_rest": "bool"}
REASONS = pa.list_(pa.struct([("code", pa.string()), ("values", pa.string())]))
RANKED = pa.schema([*KINDS.items(), ("peum_above", "double"), ("reasons", REASONS)])


@dataclass(frozen=True)
class Unstable:
    sentence: str
    below: float = 0.5
    count: int = 5
    undefined: float = float("inf")


@dataclass(frozen=True)
class Worth:
    sentence: str
    n: int
    comparison: str = "share of the worst tenth found in a tenth: PEUM 30 %"
    advice: str | None = "--by peum finds maps with an Eq below 0.5 better here"
    check: None = None


def blob(rng, at, width=2.2, grid=12):
    y, x = np.mgrid[:grid, :grid] - (grid - 1) / 2
    hill = np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * width**2))
    return np.maximum(hill + 0.06 * ndimage.gaussian_filter(rng.standard_normal((grid, grid)), 1), 0)


def views_of(rng, unrest):
    """Planes as read: a hill in the presented frame, rotated with the view, and wandering where the image is unsure."""
    at = rng.uniform(-2.5, 2.5, 2)
    back = [blob(rng, at + unrest * rng.standard_normal(2) * (t > 0)) for t in range(len(ANGLES))]
    planes = [
        ndimage.rotate(p, a, reshape=False, order=1, mode="mirror") for p, a in zip(back, ANGLES, strict=True)
    ]
    units = np.stack([(p - p.min()) / np.ptp(p) for p in back])
    agree = [np.corrcoef(p.ravel(), (sum(back) - p).ravel())[0, 1] for p in back]
    stable = [np.corrcoef(p.ravel(), back[0].ravel())[0, 1] for p in back]
    return np.stack(planes), np.mean(back, axis=0), units.var(0), np.array(agree), np.array(stable)


def fake_manifest(views=ANGLES, **given):
    """What a run of patches says of itself."""
    plain = {
        "method_description": "tap, grad_cam, 18 views aligned and averaged at features, uniform", "model": "embedded",
        "weights": hashlib.sha256(b"weights").hexdigest(), "weights_from": None, "layer": "layer4", "layout": "nchw",
        "preprocessing": "Resize(96), ToDtype(scale=True), Normalize(…)", "classes": ("normal <i>tissue</i>", "tumour"),
        "dtype": "float32", "device": "cpu", "shard_size": 1000, "calibration_size": 0, "source": "nowhere", "split": None,
        "images": 0, "data": hashlib.sha256(b"data").hexdigest(),
        "versions": (("equicam", "0.1.0"), ("python", "3.11.9"), ("torch", "2.6.0"), ("numpy", "2.1.0")),
    }  # fmt: skip
    recipe = Recipe(views=views, fill="reflect", context="none", compiled=False)
    return Manifest(recipe=recipe, **plain | given)


def fake_run(folder, *, count=24, calibrate=12, bad=3, angles=ANGLES, draw_image=None):
    """A finished run of synthetic patches, with every kind of name and trouble among them."""
    rng, patches = np.random.default_rng(5), synthetic_patches(60)
    ids = [*HOSTILE, MISSING, CHANGED, BLANK]
    ids += [f"slide-{i % 9 + 1:02d}/{i:04d}.png" for i in range(100, 100 + count - len(ids))]
    (folder / "images").mkdir(parents=True)
    rows, maps, items = [], [], []
    for i, name in enumerate(ids):
        path = folder / "images" / f"{i:05d}.png"
        image = patches[i % 60] if draw_image is None else Image.fromarray(draw_image(i))
        image.save(path)
        unrest = (2.2 if i < len(HOSTILE) + 3 else 0.3) + 3.2 * rng.beta(1.2, 4)
        planes, fused, peum, agree, stable = views_of(rng, 0 if name == BLANK else unrest)
        if name == BLANK:
            planes, fused, peum, agree, stable = 0 * planes, 0 * fused, 0 * peum, 0 * agree, 0 * stable
        arrays = [a.astype(np.float32) for a in (fused, peum, planes[: len(angles)])]
        maps.append(StoredMaps(*arrays).to_row(name))
        target = int(rng.integers(2))
        flips = rng.random(len(angles)) < 0.12 * unrest - 0.06
        flips[0] = False
        probs = np.where(flips, rng.uniform(0.05, 0.45, len(angles)), rng.uniform(0.55, 0.99, len(angles)))
        side = float(image.width)
        label = "</td><b>tumour</b>" if i == 0 else ("normal", "tumour")[target]
        row = {"id": name, "path": str(path), "sha256": file_digest(path), "bytes": path.stat().st_size}
        row |= {"width": int(side), "height": int(side), "input_box": [0.0, 0.0, side, side]}
        row |= {"label": None if i % 5 == 4 else label, "target": target}
        row |= {"confidence": probs[0], "status": "ok"}
        row |= {"peum_score": float(peum.mean()), "stability_by_view": stable[: len(angles)].tolist()}
        row["stability"] = float(stable[1 : len(angles)].mean()) if len(angles) > 1 else None
        row |= {"flip_rate": flips.mean(), "views_kept": len(angles), "view_confidence": probs.tolist()}
        tops = np.where(flips, 1 - target, target).tolist()
        row |= {"view_top1": tops, "view_agreement": agree[: len(angles)].tolist()}
        row["flags"] = ["blank"] * (name == BLANK) + ["flipped"] * bool(flips.any())
        if i < calibrate:
            row["eq"] = float(np.clip(1 - 0.3 * unrest + 0.06 * rng.standard_normal(), -1, 1))
        judged = judge_row(row, [f"{a:g}°" for a in angles], 0 if 0 in angles else None)
        rows.append(row | {"steadiness": judged.word, "steadiness_reason": judged.reason.code})
        items.append(Item(name, path, row["label"]))
        if name == MISSING:
            path.unlink()
        elif name == CHANGED:
            ImageOps.invert(image).save(path)
    for i in range(bad):
        name = UNREADABLE if i == 0 else f"broken-{i:03d}<b>.tif"
        text = f"image {name!r} needs a file that can be read whole, got truncated bytes; try a fresh copy"
        reason = Reason("unreadable", {"error": "EquicamError", "message": text}).to_row()
        row = {"id": name, "path": f"/nowhere/{i}", "status": "bad"}
        rows.append(row | {"reason": reason["code"], "reason_values": reason["values"]})
        items.append(Item(name, folder / "nowhere"))
    facts = {"calibration_size": calibrate, "source": str(folder / "images"), "images": len(items)}
    run = RunStore(folder / "run")
    run.begin(fake_manifest(angles, **facts), items, ids[:calibrate])
    run.write_shard(0, pa.Table.from_pylist(rows, schema=ITEMS), pa.Table.from_pylist(maps, schema=MAPS))
    log = Log(run.folder)
    log.add("started", {"pending": 1, "shards": 1})
    log.add("completed", {"digests": "0" * 64})
    return run


def triaged(run, *, queue=16, controls=3):
    """As a triage ranks it: silent maps first, then by PEUM; the last of the images are the blind arm."""
    ok = [row for row in run.read_items().to_pylist() if row["status"] == "ok"]
    ok.sort(key=lambda row: ("blank" not in row["flags"], -row["peum_score"]))
    ranked = list(enumerate(ok, start=1))
    chosen = [(n, row, "queue") for n, row in ranked[:queue]]
    chosen += [(n, row, "control") for n, row in ranked[::-1][:controls]]
    rows, known = [], sorted(row["peum_score"] for row in ok if "blank" not in row["flags"])
    for place, (rank, row, arm) in enumerate(reversed(chosen), start=1):
        above = round(100 * (1 - rank / len(ok)))
        values = {"signal": "peum", "value": row["peum_score"], "above_percent": above}
        told = [Reason("signal-percentile", values)]
        if row["flip_rate"] > 0:
            told.append(Reason("prediction-changes", {"views": ["40°", "180°", "200°", "220°"], "of": 18}))
        if rank % 3 == 1:
            told.append(Reason("views-disagree", {"views": ["140°"], "correlations": [0.31], "of": 18}))
        reasons = [reason.to_row() for reason in told]
        dealt = {"arm": arm, "rank": rank, "place": place, "represents_rest": arm == "control"}
        dealt["peum_above"] = sum(value < row["peum_score"] for value in known) / len(known)
        rows.append({"id": row["id"], **dealt, "reasons": reasons})
    calibrated = sum(row["eq"] is not None for row in ok)
    worth = Worth(
        f"measured on {calibrated} images: 0.17 [0.12, 0.23] have an Eq below 0.5, outside the queue 0.12 "
        "[0.08, 0.18]; PEUM and 1 − Eq have a Spearman correlation of 0.81 [0.76, 0.85], an AUROC of 0.93 [0.89, 0.97] "
        "and 5.21 [3.97, 6.42] times the catch of chance at this budget; PEUM finds them better than chance",
        calibrated,
    )
    unstable = Unstable("5 of 24 maps (20.8 %) have a stability below 0.5, 5 of them in the queue")
    facts = {"by": "peum", "quotas": {}, "unstable": unstable, "quality": worth if calibrated else None}
    return SimpleNamespace(rows=pa.Table.from_pylist(rows, schema=RANKED), **facts)


def image_row(name, stability=0.6, **more):
    """The row of an image that six views explained; what `more` does not say is unremarkable."""
    row = {"id": name, "path": f"images/{name}.png", "status": "ok", "flags": [], "target": 0}
    row |= {"confidence": 0.9, "peum_score": 0.01, "stability": stability, "views_kept": 6}
    row |= {"stability_by_view": [1.0] + [0.6] * 5, "view_confidence": [0.8] * 6}
    return row | {"view_top1": [0] * 6, "view_agreement": [0.9] * 6} | more


def table(rows):
    return pa.Table.from_pylist(rows, schema=ITEMS)


class Page(HTMLParser):
    """What a browser would make of the page: elements with attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" not in self._open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def every(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]
