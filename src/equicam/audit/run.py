"""A run as an object: audit a source, open the run again, rank it, report it and verify it.

Opening and reading a run imports no torch; the verbs that compute import it when they are called.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from equicam.errors import EquicamError
from equicam.images.files import is_allowed
from equicam.images.items import valid_utf8
from equicam.images.sources import find_items
from equicam.rasters.options import Tiling
from equicam.readers.names import class_index
from equicam.recipe import Recipe
from equicam.runs import CAUSAL_IMAGES, SHARD_SIZE
from equicam.runs.queue_files import extend_run, rank_again, rank_run, read_queue, write_queue
from equicam.runs.signals import queue_arm
from equicam.runs.store import RunStore

if TYPE_CHECKING:
    from equicam.audit.verify import Verification
    from equicam.engines.devices import Devices
    from equicam.engines.ray import Cluster
    from equicam.images.item_table import Items
    from equicam.readers.model import Model
    from equicam.runs.bounds import UnopenedBound
    from equicam.runs.causal_result import CausalTest
    from equicam.runs.export.export import Exported
    from equicam.runs.manifest import Manifest
    from equicam.runs.report.comparison import Comparison
    from equicam.runs.triage import Triage

Tick = Callable[[int], None]
"""Called with the number of images just finished."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run on disk."""

    store: RunStore

    def __post_init__(self) -> None:
        if not isinstance(self.store, RunStore):
            raise EquicamError("Run", "a store", repr(self.store), "equicam.open_run(folder)")

    def __repr__(self) -> str:
        manifest = self.manifest
        return f"Run({str(self.folder)!r}: {manifest.images:,} images, {manifest.recipe.method})"

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.store.folder

    @property
    def manifest(self) -> "Manifest":
        """The recipe and everything else that makes it reproducible."""
        return self.store.manifest

    @property
    def items(self) -> pa.Table:
        """One row per image, in order of id; those written so far if the run is not finished."""
        return self.store.read_items()

    def read_items(self, columns: list[str]) -> pa.Table:
        """These columns of the items only."""
        return self.store.read_items(columns)

    def to_pandas(self) -> Any:
        """The items as a pandas DataFrame."""
        return self.items.to_pandas()

    def queue(self) -> list[dict[str, Any]]:
        """The rows of the queue written by `triage`, by rank."""
        return queue_arm(read_queue(self.store)).to_pylist()  # type: ignore[no-any-return]

    def triage(
        self,
        budget: str | int = "10%",
        by: str = "stability",
        *,
        control: float = 0.20,
        unstable: float = 0.5,
        quotas: bool = True,
        seed: int = 0,
        more: int | None = None,
    ) -> "Triage":
        """Rank the images for review and write the queue and its exports into the run.

        `more` extends the queue there is by as many reviews, with the options it was written with; it goes alone. What
        was dealt before keeps arm, rank and place.
        """
        options: dict[str, Any] = {
            "by": by, "budget": budget, "control": control, "unstable": unstable, "quotas": quotas, "seed": seed,
        }  # fmt: skip
        if more is not None:
            _refuse_with_more(options)
            ranked, options = extend_run(self.store, more)
        else:
            ranked = rank_run(self.store, options)
        write_queue(self.store, ranked, options)
        return ranked

    def causal(
        self,
        n: int = CAUSAL_IMAGES,
        *,
        seed: int = 0,
        model: "Model | str | None" = None,
        source: str | None = None,
        weights: str | None = None,
        device: str | None = None,
        tick: Tick = lambda _count: None,
    ) -> "CausalTest":
        """Signal or noise: does the network use what drifts? The paper's causal test on `n` random images, or all if there are fewer.

        `causal.json` keeps it, and a second call with the same `n` and `seed` returns it. An image that has changed
        since the audit or cannot be read is left out.

        The run's own model is loaded by name only if a library publishes it, because anybody may have written the run;
        give any other. `source` and `weights` say where moved images and weights are now.
        """
        from equicam.audit.causal import run_causal_test
        from equicam.audit.verify import reload_run

        # called only if there is something to compute
        reload = partial(reload_run, self.store, model=model, source=source, weights=weights, device=device)
        return run_causal_test(self.store, reload, n=n, seed=seed, tick=tick)

    def report(self, top: int = 40) -> Path:
        """Write report.html and report.json on the queue's first `top` images; returns the page's path."""
        from equicam.runs.report.page import read_rows, write_report

        items = read_rows(self.store)
        ranked = rank_again(self.store, top, items)
        return write_report(self.store, ranked, top=top, items=items)

    def export(
        self,
        to: str,
        *,
        class_: int | str | None = None,
        out: str | Path | None = None,
        every: int = 8,
        regions: float | None = None,
        blind: bool = False,
        compress: bool = False,
        force: bool = False,
        tick: Tick = lambda _count: None,
    ) -> "Exported":
        """Write a run of slides, maps or DICOM images for other programs, a file for each, into its folder `export` or another.

        `to` is geotiff or ome-tiff (the maps of all windows of one class put together), qupath or geojson (windows with
        their measurements), or dicom (the map of each DICOM image). `class_` takes only windows explained for a class; `every` is the side of a cell of the
        stitched map in pixels of the model's. `regions` writes, for QuPath, the highest share of the stitched map as
        annotations instead of windows. `blind` writes the windows under review without what blinding hides. A file that
        is there is replaced only with `force`.
        """
        from equicam.runs.export.export import ExportOptions, export_run

        target = class_index(class_, self.manifest.classes, "class")
        options = ExportOptions(to, target, every, regions, blind, compress, force)
        return export_run(self.store, options, None if out is None else Path(out), tick)

    def bound(self) -> "UnopenedBound":
        """What can be stated of the maps that nobody opened, by the verdicts so far."""
        from equicam.runs.bounds import bound_unopened, count_verdicts
        from equicam.runs.verdicts import ReviewLog

        ranked, log = rank_again(self.store, 0), ReviewLog(self.store.folder)
        log.refresh()
        return bound_unopened(count_verdicts(log, ranked.rows, ranked.ok))

    def verify(
        self,
        sample: int = 20,
        *,
        seed: int | None = None,
        noted_hash: str | None = None,
        model: "Model | str | None" = None,
        source: str | None = None,
        weights: str | None = None,
        device: str | None = None,
        tick: Tick = lambda _count: None,
    ) -> "Verification":
        """Check every file, the log's chain and the rows, and if nothing differs compute a random sample again.

        `noted_hash` is the `last_hash` of an earlier call or report, kept elsewhere: the log must still hold its event.
        As in `causal`, a model that is not a library's must be given; without it nothing is computed again,
        `left_out_reason` says why, and the result is not `ok`.
        """
        from equicam.audit.verify import reload_run, verify_run

        # called only if the files are the run's own
        reload = partial(reload_run, self.store, model=model, source=source, weights=weights, device=device)
        return verify_run(self.store, reload, sample=sample, seed=seed, noted_hash=noted_hash, tick=tick)


def _refuse_other_bands(tiling: Tiling, model: "Model") -> None:
    """Refuse bands that are not as many as the means and standard deviations that normalise them."""
    bands, mean = tiling.input.bands, tiling.input.mean or model.mean
    if bands is not None and len(bands) != len(mean):
        raise EquicamError(
            "bands", f"{len(mean)}, one for each channel of the model's mean and std", ", ".join(bands),
            "other bands, or Input(mean=…, std=…) with a model of as many channels (mean and std in the recipe file)",
        )  # fmt: skip


def _refuse_with_more(options: dict[str, Any]) -> None:
    """Refuse options of `Run.triage` other than its defaults: an extended queue keeps those it was written with."""
    defaults = signature(Run.triage).parameters
    if others := [name for name, value in options.items() if value != defaults[name].default]:
        raise EquicamError(
            "more", "no other option: an extended queue keeps those it was written with", ", ".join(others),
            "more alone, or a new triage without it",
        )  # fmt: skip


def open_run(folder: str | Path, source: str | None = None) -> Run:
    """A run that exists; `source` says where its images are now if they were moved."""
    if not isinstance(folder, str | Path):
        raise EquicamError("a run", "the path of its folder", repr(folder), 'open_run("run")')
    store = RunStore(Path(folder))
    manifest = store.manifest
    if source is None:
        return Run(store)
    items = find_items(source, split=manifest.split)
    moved = {i.id: valid_utf8(str(i.path.absolute())) for i in items if is_allowed(i.path)}
    return Run(RunStore(Path(folder), moved=moved))


def compare(first: Run | str | Path, second: Run | str | Path) -> "Comparison":
    """Are the maps of the second run steadier than those of the first? Paired by image, with 95 % intervals.

    Runs with another method, other views or another option that decides the numbers are refused.
    """
    from equicam.runs.report.comparison import compare_runs

    first, second = (run if isinstance(run, Run) else open_run(run) for run in (first, second))
    return compare_runs(first.store, second.store)


def audit(
    source: str | Path,
    model: "Model",
    out: str | Path,
    *,
    recipe: Recipe | None = None,
    method: str | None = None,
    views: Any = None,
    target: int | str | None = None,
    tiling: Tiling | None = None,
    split: str | None = None,
    n: int | None = None,
    voi: tuple[float, float] | None = None,
    calibrate: int = 0,
    shard_size: int = SHARD_SIZE,
    workers: int | None = None,
    weights_from: str | None = None,
    engine: "Devices | Cluster | None" = None,
    progress: Callable[[int, int, int], None] | None = None,
    listing: Callable[[int, int, int], None] | None = None,
    notice: Callable[[str], None] = warnings.warn,
    listed: "Items | None" = None,
) -> Run:
    """Explain every image of a source into the folder `out`: a run that can be resumed, ranked, reported and verified.

    `recipe` holds every option that decides a map; the keywords `method` and `views` win. With a `tiling`, the source is a
    raster, or several: slides, GeoTIFFs; every window of theirs is an image, the recipe's context is "auto" unless it says
    otherwise, and what the tiling's input leaves open is taken from the model's. `target` is the class to explain in every
    image, by name or number, instead of each image's top-1.
    `calibrate` images, chosen at random, also get their Eq measured, so that `triage` can say how good its queue is.
    `voi` is the window (centre, width) of DICOM images, instead of the one in each file.
    `workers` processes decode images for each device; unless it is given, one less than there are CPUs, shared by the devices, and at most 10.
    `engine` computes on several devices or a Ray cluster instead of the model's own device. `progress` is called after
    every shard with (images done, all images, images done by this call), `listing` likewise after every raster that is listed, `notice` with a sentence on a shard that was
    damaged since and is computed again. Ctrl-C finishes the current shard; the same call resumes the run. `listed` are the
    items that `list_source` found in the source, if it was listed before the model was loaded.
    """
    from equicam.audit.audit import compute_run
    from equicam.protocol import find_protocol

    recipe = Recipe.of(recipe, method=method, views=views)
    if recipe.context is None:
        has_context = tiling is not None and find_protocol(recipe.protocol).has_context
        recipe = replace(recipe, context="auto" if has_context else "none")
    if tiling is not None:
        tiling = replace(tiling, input=tiling.input.or_else(model.input))
        _refuse_other_bands(tiling, model)
    store = RunStore(Path(out))
    compute_run(
        store, model, source, recipe, split=split, tiling=tiling, target=class_index(target, model.classes), n=n, voi=voi,
        calibrate=calibrate, shard_size=shard_size, workers=workers,
        weights_from=weights_from or model.weights_from, engine=engine, progress=progress, listing=listing, notice=notice,
        listed=listed,
    )  # fmt: skip
    return Run(store)
