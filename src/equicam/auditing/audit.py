"""The run: pictures decoded ahead, explained on the device, written part by part; cut off anywhere, it goes on."""

import hashlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from equicam.auditing.compute import Plans, computed, prepared
from equicam.auditing.log import Log
from equicam.auditing.manifest import Spec
from equicam.auditing.store import Run, file_digest
from equicam.auditing.worker import Auditing, versions
from equicam.core.views import Fill, refuse_unknown
from equicam.data.decoding import Decoders
from equicam.data.items import Item, digest_items, open_item, sample_by_class, valid_utf8
from equicam.data.remote import FileStat, as_path, file_stats
from equicam.data.sources import find_items
from equicam.engines.devices import Devices
from equicam.engines.worker import Home, Part, Sent
from equicam.errors import EquicamError
from equicam.evaluation.spec import MapSpec, ViewCount, describe
from equicam.methods import find
from equicam.models.images import VisibleBoxes, input_bytes
from equicam.models.weights import fingerprint
from equicam.readers.model import Model
from equicam.shards import write_whole

if TYPE_CHECKING:
    from equicam.engines.ray import Cluster

A_PART = 32


def audit(
    model: Model,
    source: str | Path,
    out: str | Path,
    *,
    method: str = "equigrad-cam",
    views: ViewCount = None,
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
    engine: "Devices | Cluster | None" = None,
    progress: "Callable[[int, int, int], None] | None" = None,
) -> Run:
    """Explain every picture of a source into a folder that can be resumed, ranked, reported and verified.

    `engine` is where: several devices or a Ray cluster instead of the model's own device. `progress` hears (done, all,
    of those in this go) after every part. Ctrl-C finishes the part at work.
    """
    chosen = find(method, views=views, as_published=as_published, tau=tau, gamma=gamma)
    if chosen.fusion.auto is not None:
        raise EquicamError(
            "an audit", needs="the same views of every picture, for PEUM ranks them against each other", got="views='auto'",
            fix="views=12",
        )  # fmt: skip
    filled = fill or ("zeros" if as_published else "reflect")
    refuse_unknown(filled)  # before the run is begun with it
    items = sample_by_class(find_items(source, split=split), n)
    items = sorted(items, key=lambda item: item.id)
    subset = calibrated(items, calibrate, seed)
    plans = Plans(model, chosen, filled, dtype, frozenset(subset))
    spec = Spec(
        model=model.name,
        weights=fingerprint(model.module),
        weights_from=weights_from,
        layer=model.layer,
        layout=str(model.layout or "inferred"),
        preprocess=_steps(model.preprocess),
        classes=model.classes,
        method=method,
        method_is=describe(MapSpec(method, chosen)),
        angles=tuple(float(a) for a in chosen.fusion.views.angles),
        fill=plans.fill,
        tau=tau,
        gamma=gamma,
        as_published=as_published,
        dtype=str(dtype or model.dtype).removeprefix("torch."),
        compiled=model.compiled,
        device=engine.kind if engine else model.device.type,
        part=part,
        calibrate=len(subset),
        seed=seed,
        source=valid_utf8(str(as_path(source).absolute())),
        split=split,
        pictures=len(items),
        data=digest_items(items),
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
            parts = [(p, items[p * part : (p + 1) * part]) for p in pending]
            if engine is None:
                written = _here(run, plans, parts, lock, max(1, workers))
            else:
                made = engine.made or Sent.copy_of(model)
                job = Auditing(
                    home=Home.at(run.folder / "manifest.json"), made=made, blind=made.blind(model), weights=spec.weights,
                    versions=spec.versions, method=method, views=views, as_published=as_published, tau=tau, gamma=gamma,
                    fill=plans.fill, dtype=dtype, calibrated=plans.calibrated, workers=max(1, workers),
                    part=part, picture_bytes=input_bytes(model),
                )  # fmt: skip
                written = engine.work(job, parts)
            _work(written, parts, len(items), progress)
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


def _here(run: Run, plans: Plans, parts: Sequence[Part], lock: int, workers: int) -> Iterator[int]:
    """The parts computed in this process, opened in others ahead of it, written while the next is computed."""
    eyes = partial(prepared, plans.model), VisibleBoxes(plans.model)
    largest = max(len(items) for _, items in parts)
    decoders = Decoders(*eyes, workers=workers, size=input_bytes(plans.model), part=largest, lock=lock)
    with closing(decoders), ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        try:
            for (number, _), found in zip(parts, decoders.parts([items for _, items in parts]), strict=True):
                tables = computed(plans, found)
                if written:
                    written.result()
                written = writer.submit(run.write_part, number, *tables)
                yield number
        finally:  # by whatever way it ends, what was computed is written
            if written:
                written.result()


def _work(
    written: Iterator[int],
    parts: Sequence[Part],
    total: int,
    progress: Callable[[int, int, int], None] | None,
) -> None:
    """Follow the parts as they are written, and stop between two when asked to."""
    sizes = {number: len(items) for number, items in parts}
    done, now = total - sum(sizes.values()), 0
    with stopping() as stop, closing(written):  # type: ignore[type-var]
        for number in written:
            now += sizes[number]
            if progress:
                progress(done + now, total, now)
            if stop():
                raise KeyboardInterrupt


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
    for row, there in zip(known, file_stats([by_id[row["id"]].path for row in known]), strict=True):
        item = by_id[row["id"]]
        # a store that knows no times leaves only the content to compare
        if there == FileStat(row["bytes"], row["mtime_ns"]) and there.mtime_ns is not None:
            continue
        if content(item) != row["sha256"]:
            raise EquicamError(
                f"resuming {valid_utf8(str(run.folder))}", needs="the pictures it was begun with",
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
