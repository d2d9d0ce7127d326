"""Write a run's maps or windows in a format of other programs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from equicam.errors import EquicamError, not_one_of
from equicam.images.items import valid_utf8
from equicam.runs.export import features, stitching
from equicam.runs.export.dicom import write_dicom_slide, write_images
from equicam.runs.export.files import ExportFolder, safe_names, write_geotiff, write_ome_tiff
from equicam.runs.log import Log
from equicam.runs.queue_files import feature_id, read_queue
from equicam.runs.store import RunStore

DEFAULT_CELL_PX = 8
Tick = Callable[[int], None]

MAPS = {"geotiff": write_geotiff, "ome-tiff": write_ome_tiff}
"""Formats of the stitched map, and their writers."""
FORMATS = {
    "geotiff": "tif",
    "qupath": "qupath.geojson",
    "ome-tiff": "ome.tif",
    "geojson": "geojson",
    "dicom": "map.dcm",
}
"""The ending of files, by format."""
WINDOWS = ("qupath", "geojson")
"""Formats of windows."""


@dataclass(frozen=True)
class ExportOptions:
    """What to write, and how."""

    to: str
    target: int | None = None  # the class; None: the one that all windows were explained for
    every: int = DEFAULT_CELL_PX  # pixels of the model's a cell
    # for QuPath: this share of the stitched map, where it is highest, instead of windows
    regions: float | None = None
    blind: bool = False  # the windows under review only, without what blinding hides
    compress: bool = False  # GeoJSON with gzip
    force: bool = False  # replace files that are there

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise not_one_of("to", FORMATS, self.to, "--to geotiff")
        if self.regions is not None and (self.to != "qupath" or not 0 < self.regions < 1):
            raise EquicamError(
                "regions", "--to qupath, and a share above 0 and below 1", f"--to {self.to}, {self.regions}",
                "--to qupath --regions 0.05",
            )  # fmt: skip
        if self.blind and (self.to not in WINDOWS or self.regions is not None or self.target is not None):
            raise EquicamError(
                "blind", "windows of all classes, because a map or a class would reveal the prediction", "a map or a class",
                "--to qupath --blind alone",
            )  # fmt: skip
        if self.compress and self.to not in WINDOWS:
            raise EquicamError("compress", "a GeoJSON format", f"--to {self.to}", "--to qupath --gzip")


@dataclass(frozen=True)
class Exported:
    """The files that were written, and what is not in them."""

    files: tuple[Path, ...]
    windows: int  # windows or images in the files
    left_out: int  # those explained for other classes, not under review, or for DICOM of several frames
    pending: int = 0  # shards that are not computed yet
    log_error: str | None = None  # why the log does not mention the export
    refused: tuple[str, ...] = ()  # why images have no file


def export_run(
    store: RunStore, options: ExportOptions, out: Path | None = None, tick: Tick = lambda _count: None
) -> Exported:
    """Write one file for each raster or image, into RUN/export unless a folder is given; `tick` counts them."""
    target, slides = options.target, options.to == "dicom" and store.manifest.tiling is not None
    if options.to == "dicom" and not slides:
        folder = _open_folder(store, options, out)
        written, left_out, refused = write_images(store, target, folder, tick)
        return _log(
            store, options, folder, Exported(folder.files, written, left_out, refused=refused), target
        )
    rasters = stitching.read_windows(store)
    before = sum(len(raster.rows) for raster in rasters)
    stitches = slides or options.to in MAPS or options.regions is not None
    if stitches or target is not None:
        target = stitching.choose_target(store.manifest, rasters, target)  # refuses one that no window has
        kept = [replace(r, rows=tuple(row for row in r.rows if row["target"] == target)) for r in rasters]
        rasters = [raster for raster in kept if raster.rows]
    places: dict[str, int] | None = None
    if options.blind:
        queue = read_queue(store)
        places = dict(zip(queue["id"].to_pylist(), queue["place"].to_pylist(), strict=True))
        rasters = [raster for raster in rasters if any(row["id"] in places for row in raster.rows)]
    if options.to == "geojson":
        features.refuse_unplaced(rasters)
    sources = {row["id"]: Path(row["path"]) for row in store.rasters().to_pylist()}
    names = _file_names(rasters, options, target)
    folder = _open_folder(store, options, out)
    folder.refuse_existing(list(names.values()))
    for raster in rasters:
        with folder.writing(names[raster.id]) as path:
            if not stitches or target is None:
                qupath = options.to == "qupath"
                features.write_features(
                    path, features.window_features(store, raster, qupath=qupath, places=places)
                )
            else:
                found = _stitched(store, raster, options, target, path.parent)
                if slides:
                    uid = feature_id(store, f"{raster.id}#map={target},{found.cell:g}")
                    write_dicom_slide(path, found, sources[raster.id], uid, feature_id(store, "series"))
                elif options.to in MAPS:
                    MAPS[options.to](path, found)
                else:
                    features.write_features(path, features.qupath_regions(store, found, options.regions or 0))
        tick(1)
    count = sum(places is None or row["id"] in places for raster in rasters for row in raster.rows)
    return _log(store, options, folder, Exported(folder.files, count, before - count), target)


def _open_folder(store: RunStore, options: ExportOptions, out: Path | None) -> ExportFolder:
    return ExportFolder(store.folder / "export" if out is None else out, force=options.force)


def _stitched(
    store: RunStore, raster: stitching.RasterWindows, options: ExportOptions, target: int, folder: Path
) -> stitching.StitchedMap:
    tiling = store.manifest.tiling
    if tiling is None:
        raise ValueError("a run of images has no rasters")
    grid = stitching.make_grid(raster, tiling.tile, options.every)
    bands = stitching.stitch(
        stitching.read_maps(store, raster.rows), grid, disc=tiling.stride == "disc", folder=folder
    )
    if len(store.manifest.transforms) == 1:
        bands[stitching.BANDS.index("PEUM")] = math.nan  # one view has no variance
    return stitching.StitchedMap(
        raster, bands, grid.cell, stitching.run_facts(store, target) | {"raster": raster.id}
    )


def _file_names(
    rasters: list[stitching.RasterWindows], options: ExportOptions, target: int | None
) -> dict[str, str]:
    """The name of every raster's file: raster, class, what it holds, and the format's ending."""
    words = [
        *([] if target is None else [f"class-{target}"]),
        *([] if options.regions is None else [f"regions-{options.regions:g}"]),
        *(["blind"] if options.blind else []),
        FORMATS[options.to],
        *(["gz"] if options.compress else []),
    ]
    return {one: ".".join([stem, *words]) for one, stem in safe_names([r.id for r in rasters]).items()}


def _log(
    store: RunStore, options: ExportOptions, folder: ExportFolder, found: Exported, target: int | None
) -> Exported:
    """Note the export in the run's log; a run on a disk that cannot be written keeps its log as it is."""
    names = {
        valid_utf8(str(path.relative_to(store.folder) if path.is_relative_to(store.folder) else path.absolute())): digest
        for path, digest in zip(folder.files, folder.written.values(), strict=True)
    }  # fmt: skip
    found, error = replace(found, pending=len(store.pending())), None
    try:
        Log(store.folder).add(
            "exported", {"to": options.to, "class": target, "blind": options.blind, "files": names}
        )
    except OSError as refused:
        error = str(refused)
    return replace(found, log_error=error)
