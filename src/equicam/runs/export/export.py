"""Write a run's maps or windows in a format of other programs."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from equicam.errors import EquicamError
from equicam.images.items import valid_utf8
from equicam.runs.export.dicom import write_dicom_slide, write_images
from equicam.runs.export.features import (
    Feature,
    lonlat_blind,
    lonlat_windows,
    qupath_blind,
    qupath_regions,
    qupath_tiles,
    refuse_unplaced,
    write_features,
)
from equicam.runs.export.files import ExportFolder, safe_names, write_geotiff, write_ome_tiff
from equicam.runs.export.stitching import (
    BANDS,
    RasterWindows,
    StitchedMap,
    choose_target,
    make_grid,
    of_target,
    read_maps,
    read_windows,
    run_facts,
    stitch,
)
from equicam.runs.log import Log
from equicam.runs.queue_files import feature_id, read_queue
from equicam.runs.store import RunStore

DEFAULT_CELL_PX = 8
Tick = Callable[[int], None]

MAPS = {"geotiff": ("tif", write_geotiff), "ome-tiff": ("ome.tif", write_ome_tiff)}
"""Formats of the stitched map: ending and writer."""
WINDOWS = {"qupath": "qupath.geojson", "geojson": "geojson"}
"""Formats of windows: ending."""
FORMATS = ("geotiff", "qupath", "ome-tiff", "geojson", "dicom")


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
            raise EquicamError("to", f"one of {', '.join(FORMATS)}", repr(self.to), "--to geotiff")
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

    @property
    def stitches(self) -> bool:
        """Whether the maps of windows are put together."""
        return self.to in MAPS or self.regions is not None


@dataclass(frozen=True)
class Exported:
    """The files that were written, and what is not in them."""

    files: tuple[Path, ...]
    windows: int  # windows or images in the files
    left_out: int  # those explained for other classes, not under review, or for DICOM of several frames
    pending: int  # shards that are not computed yet
    log_error: str | None = None  # why the log does not mention the export
    refused: tuple[str, ...] = ()  # why images have no file


def export_run(
    store: RunStore, options: ExportOptions, out: Path | None = None, tick: Tick = lambda _count: None
) -> Exported:
    """Write one file for each raster or image, into RUN/export unless a folder is given; `tick` counts them."""
    slides = options.to == "dicom" and store.manifest.tiling is not None
    if options.to == "dicom" and not slides:
        folder = _open_folder(store, options, out)
        written, left, refused = write_images(store, options.target, folder, tick)
        return replace(_exported(store, options, folder, written, left), refused=refused)
    rasters = read_windows(store)
    before = sum(len(raster.rows) for raster in rasters)
    target = options.target
    stitches = options.stitches or slides
    if stitches or target is not None:
        target = choose_target(store.manifest, rasters, target)  # refuses one that no window has
        rasters, _ = of_target(rasters, target)
    places: dict[str, int] = {}
    if options.blind:
        queue = read_queue(store)
        places = dict(zip(queue["id"].to_pylist(), queue["place"].to_pylist(), strict=True))
        rasters = [raster for raster in rasters if any(row["id"] in places for row in raster.rows)]
    if options.to == "geojson":
        refuse_unplaced(rasters)
    sources = {row["id"]: Path(row["path"]) for row in store.rasters().to_pylist()}
    names = _file_names(rasters, options, target)
    folder = _open_folder(store, options, out)
    folder.refuse_existing(list(names.values()))
    for raster in rasters:
        with folder.writing(names[raster.id]) as path:
            if stitches and target is not None:
                found = _stitched(store, raster, options, target, path.parent)
                if slides:
                    uid = feature_id(store, f"{raster.id}#map={target},{found.cell:g}")
                    write_dicom_slide(path, found, sources[raster.id], uid, feature_id(store, "series"))
                elif options.to in MAPS:
                    MAPS[options.to][1](path, found)
                else:
                    write_features(path, qupath_regions(store, found, options.regions or 0))
            else:
                write_features(path, _window_features(store, raster, options, places))
        tick(1)
    count = sum(row["id"] in places or not options.blind for raster in rasters for row in raster.rows)
    return _exported(store, options, folder, count, before - count, target)


def _open_folder(store: RunStore, options: ExportOptions, out: Path | None) -> ExportFolder:
    return ExportFolder(store.folder / "export" if out is None else out, force=options.force)


def _exported(
    store: RunStore,
    options: ExportOptions,
    folder: ExportFolder,
    written: int,
    left_out: int,
    target: int | None = None,
) -> Exported:
    target = options.target if target is None else target
    log_error = _log(store, options, target, folder)
    return Exported(folder.files, written, left_out, len(store.pending()), log_error)


def _window_features(
    store: RunStore, raster: RasterWindows, options: ExportOptions, places: dict[str, int]
) -> Iterable[Feature]:
    if options.to == "qupath":
        return qupath_blind(store, raster, places) if options.blind else qupath_tiles(store, raster)
    return lonlat_blind(store, raster, places) if options.blind else lonlat_windows(store, raster)


def _stitched(
    store: RunStore, raster: RasterWindows, options: ExportOptions, target: int, folder: Path
) -> StitchedMap:
    tiling = store.manifest.tiling
    if tiling is None:
        raise ValueError("a run of images has no rasters")
    grid = make_grid(raster, tiling.tile, options.every)
    bands = stitch(read_maps(store, raster.rows), grid, disc=tiling.stride == "disc", folder=folder)
    if len(store.manifest.transforms) == 1:
        bands[BANDS.index("PEUM")] = math.nan  # one view has no variance
    return StitchedMap(raster, bands, grid.cell, run_facts(store, target) | {"raster": raster.id})


def _file_names(rasters: list[RasterWindows], options: ExportOptions, target: int | None) -> dict[str, str]:
    """The name of every raster's file: raster, class, what it holds, and the format's ending."""
    stems = safe_names([raster.id for raster in rasters])
    ending = (
        "map.dcm"
        if options.to == "dicom"
        else MAPS[options.to][0]
        if options.to in MAPS
        else WINDOWS[options.to]
    )
    words: list[str] = []
    if target is not None:
        words.append(f"class-{target}")
    if options.regions is not None:
        words.append(f"regions-{options.regions:g}")
    if options.blind:
        words.append("blind")
    gz = ["gz"] if options.compress else []
    return {one: ".".join([stem, *words, ending, *gz]) for one, stem in stems.items()}


def _log(store: RunStore, options: ExportOptions, target: int | None, folder: ExportFolder) -> str | None:
    """Note the export in the run's log; a run on a disk that cannot be written keeps its log as it is."""
    names = {
        valid_utf8(str(path.relative_to(store.folder) if path.is_relative_to(store.folder) else path.absolute())): digest
        for path, digest in zip(folder.files, folder.written.values(), strict=True)
    }  # fmt: skip
    try:
        Log(store.folder).add(
            "exported", {"to": options.to, "class": target, "blind": options.blind, "files": names}
        )
    except OSError as error:
        return str(error)
    return None
