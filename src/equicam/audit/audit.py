"""Computing a run: images are decoded ahead, explained on the device and written shard by shard; it can be resumed."""

import hashlib
import heapq
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equicam.audit.compute import AuditContext, AuditJob, compact_preprocessing, compute_ahead, versions
from equicam.core.views import Views
from equicam.engines.devices import Devices
from equicam.engines.worker import ModelCopy, Shard, SharedFolder
from equicam.errors import EquicamError
from equicam.images.decoding import DecoderPool, decoder_count, need_network
from equicam.images.dicom import check_window
from equicam.images.files import as_path
from equicam.images.item_table import Items
from equicam.images.items import content_digest, valid_utf8
from equicam.images.sources import list_source
from equicam.methods import Method, resolve, resolve_fill
from equicam.models.images import VisibleBoxes
from equicam.models.preprocessing import Preprocessing
from equicam.models.surround import surround_bytes
from equicam.models.weights import fingerprint
from equicam.rasters.options import Tiling
from equicam.rasters.tiling import RasterRow, cut_windows
from equicam.readers.model import Model
from equicam.recipe import MAX_VIEWS, Recipe
from equicam.runs.log import Log, Notice, complete, heal, is_complete, log_shard, log_start, refuse_lost_log
from equicam.runs.manifest import LARGEST, Manifest, are_views, margin_of
from equicam.runs.store import RunStore
from equicam.shards import map_concurrently

if TYPE_CHECKING:
    from equicam.engines.ray import Cluster

LOG = logging.getLogger(__name__)
REPAYING_VIEWS = 300_000
"""Views after which compiling is about repaid: on one H200 in bf16 after 260,000 on VGG-16, 480,000 on ResNet-50."""
Progress = Callable[[int, int, int], None]
"""Called after every shard with (images done, all images, images done by this call)."""


def compute_run(
    store: RunStore,
    model: Model,
    source: str | Path,
    recipe: Recipe,
    *,
    split: str | None,
    tiling: Tiling | None,
    target: int | None,
    n: int | None,
    voi: tuple[float, float] | None,
    calibrate: int,
    shard_size: int,
    workers: int | None,
    weights_from: str | None,
    engine: "Devices | Cluster | None",
    progress: Progress | None,
    listing: Progress | None,
    notice: Notice,
    listed: Items | None = None,
) -> None:
    """Explain every image of a source into the store, continuing where an earlier call stopped.

    Ctrl-C finishes the current shard. `listed` are the source's items, if the caller has listed them already.
    """
    if model.value is not None:
        raise EquicamError(
            "an audit", "a target that its manifest can record", "a function of the model's output",
            "a module that returns this value, with task=\"regression\"",
        )  # fmt: skip
    recipe, description = resolve_recipe(model, recipe)
    voi = None if voi is None else check_window(voi)
    with ThreadPoolExecutor(1) as other_thread:  # while images are listed
        weights = other_thread.submit(fingerprint, model.module)
        options = source, split, tiling, recipe.context, voi
        every, rasters = list_items(*options, listed=listed, listing=listing)
        items = every.sample(n)
    workers = decoder_count(workers, len(items), len(engine.names) if isinstance(engine, Devices) else 1)
    device = engine.kind if engine else model.device.type
    compile_now = recipe.compiled is None and _is_repaid(device, len(items), len(Views(recipe.views)))
    recipe = replace(recipe, compiled=compile_now or bool(recipe.compiled))
    if compile_now:
        notice(f"{len(items):,} images: the network is compiled first, which takes about half a minute")
    calibration = _calibration_subset(items, calibrate, recipe.seed)
    manifest = Manifest(
        recipe=recipe,
        method_description=description,
        model=model.name,
        weights=weights.result(),
        weights_from=weights_from,
        layer=model.layer,
        layout=str(model.layout or "inferred"),
        preprocessing=_describe_preprocessing(model.preprocess),
        classes=model.classes,
        dtype=recipe.dtype or str(model.dtype).removeprefix("torch."),
        device=device,
        shard_size=shard_size,
        calibration_size=len(calibration),
        source=valid_utf8(str(as_path(source).absolute())),
        split=split,
        images=len(items),
        data=items.digest(),
        versions=versions(rasters=tiling is not None, dicom=bool(items.dicom_places())),
        tiling=tiling,
        target=target,
        task=model.task,
        voi=voi,
        given_preprocessing=given.to_json() if isinstance(given := model.preprocess, Preprocessing) else None,
    )
    context = AuditContext.of(manifest, model, frozenset(calibration))
    store.refuse_foreign()
    with _removed_if_empty(store), store.writing() as lock:
        log = Log(store.folder)
        refuse_lost_log(store, log)
        store.begin(manifest, items, calibration, rasters)
        if store.started():
            heal(store, log, partial(store.write_head, manifest, items, calibration, rasters), notice)
        _refuse_changed(store, items)
        pending = store.pending()
        log_start(store, log, len(pending))
        if pending:
            shards = [(p, items[p * shard_size : (p + 1) * shard_size]) for p in pending]
            if engine is None:
                written = _compute_here(store, log, context, shards, lock, workers, tiling)
            else:
                model_source = engine.model_source or ModelCopy.copy_of(model)
                job = AuditJob(
                    SharedFolder.at(store.folder / "manifest.json"), manifest, context.calibration, model_source,
                    model_source.preprocessing_only(model), workers, surround_bytes(model, recipe.context, tiling),
                )  # fmt: skip
                written = _compute_on(engine, job, shards, log)
            _follow(written, shards, len(items), progress)
        if pending or not is_complete(store, log):
            complete(store, log)


def _is_repaid(device: str, images: int, views: int) -> bool:
    """Whether a run is long enough for compiling to pay: nothing is compiled on a CPU unless the caller says so."""
    return device == "cuda" and images * views >= REPAYING_VIEWS


@contextmanager
def _removed_if_empty(store: RunStore) -> Iterator[None]:
    """Remove a folder that an error leaves without any shard, unless it was there before."""
    is_new = not store.folder.exists()
    try:
        yield
    except EquicamError:
        if is_new and not store.started():
            shutil.rmtree(store.folder, ignore_errors=True)
        raise


def list_items(
    source: str | Path,
    split: str | None,
    tiling: Tiling | None,
    context: str,
    voi: tuple[float, float] | None,
    *,
    from_user: bool = True,
    listed: Items | None = None,
    listing: Progress | None = None,
) -> tuple[Items, list[RasterRow]]:
    """The items of a source; with a tiling, windows of its rasters, with the margin that context needs."""
    items = listed or list_source(source, split=split, from_user=from_user, frames=tiling is None)
    if tiling is None:
        return replace(items, voi=voi), []
    numbers = count(1)

    def tick(_raster: object) -> None:
        if listing:
            listing(number := next(numbers), len(items), number)

    return cut_windows(items, tiling, margin_of(tiling, context), tick)


def resolve_recipe(model: Model, recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with its views, fill and autocast type spelled out, and a description of its method."""
    method = resolve(recipe)
    dtype = None if recipe.dtype == str(model.dtype).removeprefix("torch.") else recipe.dtype
    resolved = replace(recipe, views=method.fusion.views, fill=resolve_fill(recipe), dtype=dtype)
    if not are_views(resolved.views):
        raise EquicamError(
            "an audit", f"at most {MAX_VIEWS:,} views, with numbers up to {LARGEST:g}", f"{len(resolved.views):,} views",
            "views=18",
        )  # fmt: skip
    return resolved, _describe_method(method)


def _describe_method(method: Method) -> str:
    """Everything a method's name stands for, in text that is the same in every process."""
    fusion = method.fusion
    read, combine, weigh = map(_describe_callable, (method.reader.read, method.combine, fusion.weigh))
    stages = f"{fusion.align_at}→{fusion.mean_at}"
    return " · ".join([read, combine, f"{list(fusion.views.to_plain())}", stages, weigh])


def _describe_callable(fn: Any) -> str:
    if isinstance(fn, partial):
        options = (f"{k}={_describe_callable(v) if callable(v) else v!r}" for k, v in fn.keywords.items())
        return f"{_describe_callable(fn.func)}({', '.join(options)})"
    return repr(fn) if is_dataclass(fn) else getattr(fn, "__qualname__", type(fn).__qualname__)


def _describe_preprocessing(preprocess: Any) -> str:
    """Text that is the same in every process."""
    text = " ".join(str(preprocess or "ImageNet's").split())
    if " at 0x" not in text:
        return text
    kind = preprocess if hasattr(preprocess, "__qualname__") else type(preprocess)
    return f"{kind.__module__}.{kind.__qualname__}"


def _calibration_subset(items: Items, count: int, seed: int) -> list[str]:
    """The ids of a random subset, the same whatever the order of the items."""
    if count < 0:
        raise EquicamError("calibrate", "a number of images", count, "calibrate=200")

    def key(name: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{name}\0calibrate".encode()).digest()

    return heapq.nsmallest(count, items.iter_ids(), key)


def _compute_on(
    engine: "Devices | Cluster", job: AuditJob, shards: Sequence[Shard], log: Log
) -> Iterator[int]:
    """Let an engine compute the shards; this process notes their digests, because other machines share no database."""
    with closing(engine.work(job, shards)) as written:  # type: ignore[type-var]
        for number, digests in written:
            log_shard(log, number, digests)
            yield number


def _compute_here(
    store: RunStore, log: Log, context: AuditContext, shards: Sequence[Shard], lock: int, workers: int,
    tiling: Tiling | None,
) -> Iterator[int]:  # fmt: skip
    """Compute shards in this process, decode ahead in others, and write each while the next is computed."""
    model = context.model
    decoders = DecoderPool(
        compact_preprocessing(model, context.recipe.context), VisibleBoxes(model), workers=workers,
        image_bytes=surround_bytes(model, context.recipe.context, tiling), shard_size=max(len(items) for _, items in shards), lock=lock,
        network=need_network(items for _, items in shards),
    )  # fmt: skip
    with closing(decoders), ThreadPoolExecutor(1) as writer:
        writing: Future[dict[str, str]] | None = None
        try:
            decoded_shards = decoders.decode_shards([items for _, items in shards])
            numbered = zip((number for number, _ in shards), decoded_shards, strict=True)
            start = time.perf_counter()
            for number, tables in compute_ahead(context, numbered):
                start, before = time.perf_counter(), start
                took = start - before
                LOG.info("shard %d: %d images, %.1f s after the one before", number, len(tables[0]), took)
                if writing:
                    writing.result()
                writing = writer.submit(store.write_shard, number, *tables, partial(log_shard, log))
                yield number
        finally:  # however this ends, the last computed shard is written
            if writing:
                writing.result()


def _follow(written: Iterator[int], shards: Sequence[Shard], total: int, progress: Progress | None) -> None:
    """Report shards as they are written; after Ctrl-C, stop between two."""
    sizes = {number: len(items) for number, items in shards}
    done, now = total - sum(sizes.values()), 0
    with _stop_after_shard() as stop, closing(written):  # type: ignore[type-var]
        for number in written:
            now += sizes[number]
            if progress:
                progress(done + now, total, now)
            if stop():
                raise KeyboardInterrupt


@contextmanager
def _stop_after_shard() -> Iterator[Callable[[], bool]]:
    """Remember Ctrl-C so that the current shard can be finished; a second one stops at once."""
    interrupted = threading.Event()

    def note(_signal: int, _frame: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    if threading.current_thread() is not threading.main_thread():
        yield interrupted.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _refuse_changed(store: RunStore, items: Items) -> None:
    """Refuse to resume if an image that was explained has changed since."""
    size = store.manifest.shard_size

    def changed(number: int) -> str | None:
        """The id of such an image of a shard."""
        known = store.read_shard("items", number, ["bytes", "mtime_ns", "sha256"])
        now = items[number * size : (number + 1) * size]
        before = zip(known["bytes"].to_pylist(), known["mtime_ns"].to_pylist(), strict=True)
        for place, ((size_then, time_then), stat) in enumerate(zip(before, now.stats(), strict=True)):
            # some remote stores have no modification times: only the content can be compared
            same = stat.mtime_ns is not None and stat.mtime_ns == time_then and stat.bytes == size_then
            if not same and content_digest(now[place]) != known["sha256"][place].as_py():
                return now[place].id
        return None

    written = filter(store.has_shard, range(store.shard_count))
    if name := next(filter(None, map_concurrently(changed, written)), None):
        raise EquicamError(
            f"resuming {store.shown}", "the images it was started with", f"{name!r} changed since it was explained",
            "another --out, or the image as it was",
        )  # fmt: skip
