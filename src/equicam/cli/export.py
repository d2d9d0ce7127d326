"""The command that writes a run for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from equicam.cli import options
from equicam.console import answer, exit_on_error, note, say, show_progress

MAX_REFUSED = 5  # reasons printed


def export(
    run: options.RunFolder,
    to: Annotated[str, typer.Option(help="geotiff, qupath, ome-tiff, geojson or dicom.", show_default=False)],
    class_: Annotated[
        str | None,
        typer.Option(
            "--class", help="Only windows explained for this class, by name or number.", show_default="the run's, if it has one alone"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write into.", show_default="RUN/export")] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Side of a cell of the stitched map, in pixels at the model's resolution.")
    ] = 8,
    regions: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="For QuPath: annotations of the highest share of the stitched map, instead of windows.",
            show_default=False,
        ),
    ] = None,
    blind: Annotated[
        bool,
        typer.Option("--blind", help="Only windows under review, by place, without class, scores or rank."),
    ] = False,
    compress: Annotated[bool, typer.Option("--gzip", help="Compress GeoJSON; QuPath reads it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:  # fmt: skip
    """Write a run of slides, maps or DICOM images for other programs, a file for each.

    geotiff and ome-tiff hold the maps of all windows put together; qupath and geojson (QGIS) hold the windows with
    their measurements; dicom holds the map of each DICOM image. A file that is there, into which verdicts may have been
    drawn, is replaced only with --force.

    Example: `equicam export run --to geotiff --class forest`
    """
    with exit_on_error(), show_progress("exporting", unit="files") as progress:
        import equicam

        found = equicam.open_run(run).export(
            to,
            class_=class_,
            out=out,
            every=every,
            regions=regions,
            blind=blind,
            compress=compress,
            force=force,
            tick=progress.advance,
        )
    files = {"run": str(run), "to": to, "files": [str(path) for path in found.files]}
    counts = {
        name: getattr(found, name) for name in ("windows", "left_out", "refused", "pending", "log_error")
    }
    answer("export", files | counts)
    for path in found.files:
        say(f"written: {path}")
    if found.left_out:
        why = "not under review" if blind else "explained for other classes"
        why = "of other classes, other formats or several frames" if to == "dicom" else why
        images = "images" if to == "dicom" else "windows"
        note(f"{found.windows:,} {images}; {found.left_out:,} are {why} and left out")
    for why in found.refused[:MAX_REFUSED]:
        note(f"left out: {why}")
    if len(found.refused) > MAX_REFUSED:
        note(f"and {len(found.refused) - MAX_REFUSED:,} more images without a file")
    if found.pending:
        note(f"{found.pending:,} shards of the run are not computed yet: the same audit command resumes it")
    if found.log_error:
        note(f"the run's log could not be written: {found.log_error}")
