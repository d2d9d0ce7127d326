"""The run: pictures decoded ahead, explained on the device, written part by part; cut off anywhere, it goes on."""

import hashlib
import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from equicam import __version__
from equicam.audit.decode import Decoders, Opened, stamp
from equicam.audit.log import Log
from equicam.audit.spec import Spec
from equicam.audit.store import ITEMS, MAPS, Drawn, Run, file_digest
from equicam.data.items import Item, digest, open_item, readable, spread
from equicam.data.sources import find_items
from equicam.errors import EquicamError
from equicam.explain import explanation, read
from equicam.geometry import Fill, Views
from equicam.methods import Method, find
from equicam.models.images import as_batch, preprocessed, seen_box
from equicam.models.model import Model
from equicam.models.weights import fingerprint
from equicam.parts import write_whole
from equicam.scores.asked import Asked, described
from equicam.scores.equivariance import ANGLES, equivariance
from equicam.scores.likeness import own_and_others, pearson
from equicam.scores.look import Plan, look
from equicam.scores.protocol import Truth
from equicam.seen import fuse, in_groups, see

A_PART = 32


@dataclass(frozen=True)
class Plans:
    """How every picture of a run is explained."""

    model: Model
    method: Method
    fill: Fill
    dtype: torch.dtype | None
    calibrated: frozenset[str]
    chunk: int | None = None


def audit(
    model: Model,
    source: str | Path,
    out: str | Path,
    *,
    method: str = "equigrad-cam",
    views: int | Views | None = None,
    split: str | None = None,
    n: int | None = None,
    calibrate: int = 0,
    fill: Fill | None = None,
    as_published: bool = False,
    tau: float | None = None,
    gamma: float | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    part: int = A_PART,
    workers: int = 2,
    weights_from: str | None = None,
    progress: "Callable[[int, int, int], None] | None" = None,
) -> Run:
    """Explain every picture of a source into a folder that can be resumed, ranked, reported and verified.

    `progress` hears (done, all, of those in this go) after every part. Ctrl-C finishes the part at work.
    """
    chosen = find(method, views=views, as_published=as_published, tau=tau, gamma=gamma)
    items = spread(find_items(source, split=split), n)
    items = sorted(items, key=lambda item: item.id)
    subset = calibrated(items, calibrate, seed)
    plans = Plans(model, chosen, fill or ("zeros" if as_published else "reflect"), dtype, frozenset(subset))
    spec = Spec(
        model=model.name,
        weights=fingerprint(model.module),
        weights_from=weights_from,
        layer=model.layer,
        layout=str(model.layout or "inferred"),
        preprocess=_steps(model.preprocess),
        classes=model.classes,
        method=method,
        method_is=described(Asked(method, chosen)),
        angles=tuple(float(a) for a in chosen.fusion.views.angles),
        fill=plans.fill,
        tau=tau,
        gamma=gamma,
        as_published=as_published,
        dtype=str(dtype or model.dtype).removeprefix("torch."),
        device=model.device.type,
        part=part,
        calibrate=len(subset),
        seed=seed,
        source=readable(str(Path(source).absolute())),
        split=split,
        pictures=len(items),
        data=digest(items),
        versions=versions(),
    )
    run = Run(Path(out))
    run.refuse_foreign()
    with run.writing() as lock:
        run.begin(spec, items, subset)
        _refuse_changed(run, items)
        log = Log(run.folder)
        pending = run.pending()
        log.add("resumed" if log.events() else "started", {"pending": len(pending), "parts": run.parts})
        if pending:
            _work(run, plans, items, pending, lock, workers, progress)
        if pending or not sealed(run, log):
            _finish(run, log)
    return run


def _steps(preprocess: Any) -> str:
    """A preprocessing in words that stay the same from process to process."""
    text = " ".join(str(preprocess or "ImageNet's").split())
    if " at 0x" not in text:
        return text
    kind = preprocess if hasattr(preprocess, "__qualname__") else type(preprocess)
    return f"{kind.__module__}.{kind.__qualname__}"


def calibrated(items: Sequence[Item], count: int, seed: int) -> list[str]:
    """A random subset of the pictures' ids, the same whatever their order."""
    if count < 0:
        raise EquicamError("calibrate", needs="a number of pictures", got=count, fix="--calibrate 200")

    def key(item: Item) -> bytes:
        return hashlib.sha256(f"{seed}\0{item.id}\0calibrate".encode()).digest()

    return [item.id for item in sorted(items, key=key)[:count]]


def versions() -> tuple[tuple[str, str], ...]:
    """What computed the rows."""
    return (
        ("equicam", __version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("torchvision", metadata.version("torchvision")),
        ("numpy", np.__version__),
        ("pillow", PIL.__version__),
    )


def _work(
    run: Run,
    plans: Plans,
    items: Sequence[Item],
    pending: Sequence[int],
    lock: int,
    workers: int,
    progress: Callable[[int, int, int], None] | None,
) -> None:
    size = run.spec.part
    parts = [items[p * size : (p + 1) * size] for p in pending]
    done = len(items) - sum(map(len, parts))
    now = 0
    prepare = partial(prepared, plans.model)
    decoders = Decoders(prepare, partial(seen_box, plans.model), workers=max(1, workers), lock=lock)
    try:
        with stopping() as stop:
            for number, found in zip(pending, decoders.parts(parts), strict=True):
                rows, maps = computed(plans, found)
                run.write_part(number, rows, maps)
                now += len(found)
                if progress:
                    progress(done + now, len(items), now)
                if stop():
                    raise KeyboardInterrupt
    finally:
        decoders.close()


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, for the part at work to be finished; a second one stops at once."""
    asked = threading.Event()

    def note(_signal: int, _frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def prepared(model: Model, picture: Any) -> np.ndarray:
    """A picture as the model's input, as an array that goes from process to process."""
    return np.ascontiguousarray(preprocessed(model, picture).float().numpy())


def sealed(run: Run, log: Log) -> bool:
    """Whether the digests there are those the log was last sealed with."""
    there, events = run.folder / "digests.json", log.events("completed")
    return there.is_file() and bool(events) and events[-1].payload.get("digests") == file_digest(there)


def _finish(run: Run, log: Log) -> None:
    """The digest of every part, and an event that seals them."""
    text = json.dumps(run.digests(), indent=1).encode()
    write_whole(run.folder / "digests.json", text)
    log.add("completed", {"digests": hashlib.sha256(text).hexdigest()})


def _refuse_changed(run: Run, items: Sequence[Item]) -> None:
    """A picture that was explained must still be the one that is there."""
    by_id = {item.id: item for item in items}
    known = run.items(["id", "bytes", "mtime_ns", "sha256"]).to_pylist()
    for row in known:
        item = by_id[row["id"]]
        there = stamp(item)
        if (there.get("bytes"), there.get("mtime_ns")) == (row["bytes"], row["mtime_ns"]):
            continue
        if content(item) != row["sha256"]:
            raise EquicamError(
                f"resuming {readable(str(run.folder))}", needs="the pictures it was begun with",
                got=f"{row['id']!r} changed since it was explained", fix="another --out, or the picture as it was",
            )  # fmt: skip


def content(item: Item) -> str | None:
    """SHA-256 of a picture's file, or of its pixels where a file holds many; None where there is nothing to read."""
    try:
        if item.index is None:
            return file_digest(item.path)
        return hashlib.sha256(open_item(item).tobytes()).hexdigest()
    except (OSError, ValueError):
        return None


@torch.no_grad()
def computed(plans: Plans, found: Sequence[Opened]) -> tuple[pa.Table, pa.Table]:
    """Rows and maps of a part, bad pictures among them in their place."""
    start = time.perf_counter()
    good = [o for o in found if o.x is not None]
    shapes = {o.x.shape for o in good if o.x is not None}
    if len(shapes) > 1:
        raise EquicamError(
            "preprocessing",
            needs="to bring every picture to one size",
            got=sorted(shapes),
            fix="a crop or resize in it",
        )
    facts: dict[str, dict[str, Any]] = {}
    maps: list[dict[str, Any]] = []
    if good:
        # inference tensors cannot join a backward pass, and our own algebra is never autocast
        with torch.inference_mode(False), torch.autocast(plans.model.device.type, enabled=False):
            x = torch.from_numpy(np.stack([o.x for o in good if o.x is not None]))
            finite = x.flatten(1).isfinite().all(1).tolist()
            rest = [o for o, fine in zip(good, finite, strict=True) if fine]
            for o, fine in zip(good, finite, strict=True):
                if not fine:
                    facts[o.item.id] = {"reason": "preprocessing made NaN or infinity of it"}
            if rest:
                some, drawn = _one_by_one(plans, as_batch(plans.model, x[finite]), [o.item.id for o in rest])
                facts |= some
                maps = [one.row(name) for name, one in drawn.items()]
    each = (time.perf_counter() - start) / max(1, len(good))
    rows = [_row(o, facts.get(o.item.id, {}), each) for o in found]
    return pa.Table.from_pylist(rows, schema=ITEMS), pa.Table.from_pylist(maps, schema=MAPS)


def _one_by_one(
    plans: Plans, x: Float[Tensor, "b c H W"], ids: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
    """All together; where the model refuses some, each alone, and the refused ones with the reason."""
    try:
        return _explained(plans, x, ids)
    except EquicamError as refused:
        facts: dict[str, dict[str, Any]] = {}
        drawn: dict[str, Drawn] = {}
        for i, name in enumerate(ids):
            try:
                some, maps = _explained(plans, x[i : i + 1], [name])
                facts |= some
                drawn |= maps
            except EquicamError as error:
                facts[name] = {"reason": str(error)}
        if not drawn:  # nothing to do with single pictures
            raise refused
        return facts, drawn


def _row(o: Opened, facts: dict[str, Any], each: float) -> dict[str, Any]:
    reason = o.reason or facts.get("reason")
    label = None if o.item.label is None else str(o.item.label)
    kept = ("sha256", "bytes", "mtime_ns", "width", "height", "frame")
    path = readable(str(o.item.path.absolute()))
    row: dict[str, Any] = {"id": o.item.id, "path": path, "index": o.item.index, "label": label}
    row |= {name: getattr(o, name) for name in kept}
    row |= {**facts, "status": "bad" if reason else "ok", "reason": reason}
    return row | {"seconds": o.seconds + (0 if reason else each)}


def _explained(
    plans: Plans, x: Float[Tensor, "b c H W"], ids: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
    fusion = plans.method.fusion
    reading = partial(read, plans.model, plans.method.reader, plans.dtype)

    def work(some: slice, most: int) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
        fused = fuse(
            see(reading, x[some], fusion.views, None, most), plans.method.combine, fusion, plans.fill
        )
        return _facts(fused, ids[some])

    facts: dict[str, dict[str, Any]] = {}
    drawn: dict[str, Drawn] = {}
    for one, pictures in in_groups(x, len(fusion.views.presented_first()[0]), plans.chunk, work):
        facts |= one
        drawn |= pictures
    wanted = [i for i, name in enumerate(ids) if name in plans.calibrated]
    if wanted:
        for i, eq in zip(wanted, single_view_eq(plans, x[wanted], [ids[i] for i in wanted]), strict=True):
            facts[ids[i]]["eq"] = eq
    return facts, drawn


def _facts(fused: Any, ids: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
    e, seen = explanation(fused), fused.seen
    grid = e.planes.shape[-2:]
    peum = torch.nn.functional.adaptive_avg_pool2d(e.peum, (grid[0], grid[1]))
    # how each view's own plane agrees with the mean of the others, turned back at layer resolution
    back = Views(e.angles).undo(e.planes.transpose(0, 1), "reflect").transpose(0, 1)
    agree = torch.stack([_agreement(planes) for planes in back])
    probs = seen.presented.probs
    top = probs.topk(min(5, probs.shape[1]), dim=1)
    columns: dict[str, list[Any]] = {
        "target": e.target.tolist(),
        "prob": e.sure.tolist(),
        "top5": top.indices.tolist(),
        "top5_prob": top.values.tolist(),
        "peum": e.score.double().tolist(),
        "flip_rate": e.flips.double().mean(1).tolist(),
        "kept": e.kept.sum(1).tolist(),
        "prob_by_view": e.prob.tolist(),
        "top1_by_view": seen.top1[fused.place].T.tolist(),
        "agree_by_view": agree.tolist(),
        "flags": [sorted(flags) for flags in e.flags],
    }
    facts = {name: {key: values[i] for key, values in columns.items()} for i, name in enumerate(ids)}
    arrays = [v.float().cpu().numpy() for v in (e.plane, peum, e.planes)]
    return facts, {name: Drawn(*(a[i] for a in arrays)) for i, name in enumerate(ids)}


def _agreement(planes: Float[Tensor, "t h w"]) -> Float[Tensor, " t"]:
    """Pearson of each view with the mean of the others inside the disc; 0 where either is flat, 1 for a lone view."""
    if len(planes) == 1:
        return torch.ones(1, dtype=torch.float64, device=planes.device)
    others = (planes.sum(0) - planes) / (len(planes) - 1)
    return own_and_others(pearson(planes, others, "disc"))[0]


def single_view_eq(plans: Plans, x: Float[Tensor, "b c H W"], ids: Sequence[str]) -> list[float]:
    """Disc Eq of Grad-CAM over the seven angles: what PEUM is held against."""
    asked = (Asked("grad-cam", find("grad-cam")),)
    plan = Plan({"plain": plans.model}, asked, ANGLES, "reflect", dtype=plans.dtype, chunk=plans.chunk)
    found = look(plan, ids, x, [Truth()] * len(ids), lambda _share: None)
    maps = found.shown["grad-cam"].maps
    values: list[float] = equivariance(maps[1:], maps[0], ANGLES).value.mean(0).tolist()
    return values
