"""A run as an object: audit a source, open the run again, rank it, report it and verify it.

Opening and reading a run imports no torch; the verbs that compute import it when they are called.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from equicam.auditing import SHARD_SIZE
from equicam.auditing.queue_files import rank_again, rank_run, read_evidence, read_queue, write_queue
from equicam.auditing.store import RunStore
from equicam.data.items import valid_utf8
from equicam.data.remote import is_allowed
from equicam.data.sources import find_items
from equicam.recipe import Recipe

if TYPE_CHECKING:
    from equicam.auditing.manifest import Manifest
    from equicam.auditing.triage import Triage
    from equicam.auditing.verify import Verification
    from equicam.engines.devices import Devices
    from equicam.engines.ray import Cluster
    from equicam.readers.model import Model

Tick = Callable[[int], None]
"""Called with the number of images just finished."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run on disk."""

    store: RunStore

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
        rows = read_queue(self.store).to_pylist()
        return sorted((row for row in rows if row["arm"] == "queue"), key=lambda row: row["rank"])

    def triage(
        self,
        budget: str | int = "10%",
        by: str = "peum",
        *,
        control: float = 0.20,
        alpha: float = 0.10,
        unstable: float = 0.5,
        quotas: bool = True,
        evidence: int = 40,
        seed: int = 0,
        model: "Model | None" = None,
        source: str | None = None,
        weights: str | None = None,
        device: str | None = None,
        tick: Tick = lambda _count: None,
    ) -> "Triage":
        """Rank the images for review and write the queue, its exports and the evidence on its head into the run.

        `model` is needed for evidence on a run of your own module; without it such a run gets none. `source` and
        `weights` say where moved images and weights are now.
        """
        options = {
            "by": by, "budget": budget, "control": control, "alpha": alpha, "unstable": unstable, "quotas": quotas,
            "seed": seed,
        }  # fmt: skip
        found = rank_run(self.store, options)
        head = [row["id"] for row in found.queue()[:evidence]]
        measured = None
        # all that may fail or take long comes before the first write: files and log belong together
        if head and (model is not None or self.manifest.model is not None):
            from equicam.auditing.evidence import evidence_on
            from equicam.auditing.reload import reload_run

            reloaded = reload_run(self.store, model=model, source=source, weights=weights, device=device)
            on_head = evidence_on(self.store, reloaded, head, tick)
            measured = {name: one.to_json() for name, one in on_head.items()}
            found = replace(found, without_evidence=tuple(name for name in head if name not in measured))
        write_queue(self.store, found, options, measured)
        return found

    def report(self, top: int = 40) -> Path:
        """Write report.html and report.json on the queue's first `top` images; returns the page's path."""
        from equicam.report.page import write_report

        return write_report(self.store, rank_again(self.store), evidence=read_evidence(self.store), top=top)

    def verify(
        self,
        sample: int = 20,
        *,
        seed: int = 0,
        noted_hash: str | None = None,
        model: "Model | None" = None,
        source: str | None = None,
        weights: str | None = None,
        device: str | None = None,
        tick: Tick = lambda _count: None,
    ) -> "Verification":
        """Check every file against its digest and the log's chain, and compute a random sample again."""
        from equicam.auditing.reload import reload_run
        from equicam.auditing.verify import verify_run

        reloaded = None
        if sample:
            reloaded = reload_run(self.store, model=model, source=source, weights=weights, device=device)
        return verify_run(self.store, reloaded, sample=sample, seed=seed, noted_hash=noted_hash, tick=tick)


def open_run(folder: str | Path, source: str | None = None) -> Run:
    """A run that exists; `source` says where its images are now if they were moved."""
    store = RunStore(Path(folder))
    manifest = store.manifest
    if source is None:
        return Run(store)
    items = find_items(source, split=manifest.split)
    moved = {i.id: valid_utf8(str(i.path.absolute())) for i in items if is_allowed(i.path)}
    return Run(RunStore(Path(folder), moved=moved))


def audit(
    source: str | Path,
    model: "Model",
    out: str | Path,
    *,
    method: str = "equigrad-cam",
    views: Any = None,
    fill: str | None = None,
    as_published: bool = False,
    tau: float | None = None,
    gamma: float | None = None,
    dtype: Any = None,
    compiled: bool = False,
    seed: int = 0,
    split: str | None = None,
    n: int | None = None,
    calibrate: int = 0,
    shard_size: int = SHARD_SIZE,
    workers: int = 2,
    weights_from: str | None = None,
    engine: "Devices | Cluster | None" = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Run:
    """Explain every image of a source into the folder `out`: a run that can be resumed, ranked, reported and verified.

    `calibrate` images, chosen at random, also get their Eq measured, so that `triage` can say how good its queue is.
    `engine` computes on several devices or a Ray cluster instead of the model's own device. `progress` is called after
    every shard with (images done, all images, images done by this call). Ctrl-C finishes the current shard; the same
    call resumes the run.
    """
    from equicam.auditing.audit import compute_run

    recipe = Recipe(
        method=method, views=views, fill=fill, as_published=as_published, tau=tau, gamma=gamma, dtype=dtype,
        compiled=compiled, seed=seed,
    )  # fmt: skip
    store = RunStore(Path(out))
    compute_run(
        store, model, source, recipe, split=split, n=n, calibrate=calibrate, shard_size=shard_size, workers=workers,
        weights_from=weights_from, engine=engine, progress=progress,
    )  # fmt: skip
    return Run(store)
