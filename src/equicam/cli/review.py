"""`equicam review`. It never imports torch."""

from pathlib import Path
from typing import Annotated

import typer

from equicam.cli import options
from equicam.cli.shared import announce_page, needing_web_server
from equicam.console import answer, exit_on_error, output, say
from equicam.errors import EquicamError


def review(
    run: options.RunFolder,
    reviewer: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the reviewer. Given several times: a personal link for each.",
            show_default="the login name",
        ),
    ] = None,
    blinding: Annotated[
        bool,
        typer.Option(help="Hide label, confidence and signals of an image until the first verdict on it."),
    ] = True,
    blind_class: Annotated[
        bool, typer.Option("--blind-class", help="Also hide the class that the map explains.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the page.", show_default="8321, or a free one"),
    ] = None,
    browser: options.Browser = True,
    source: options.MovedSource = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write all verdicts to this .csv or .json file and exit.", show_default=False),
    ] = None,
    import_: Annotated[
        Path | None,
        typer.Option(
            "--import",
            help="Take the verdicts in a GeoJSON file of QuPath or QGIS, under the name of --reviewer, and exit.",
            show_default=False,
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="With --import: verdicts may replace that reviewer's earlier ones."),
    ] = False,
) -> None:
    """Give verdicts on the queue of a run, in the browser, by keyboard.

    Example: `equicam review run --reviewer ana`, or `equicam review run --export verdicts.csv`
    """
    with exit_on_error():
        import equicam

        store = equicam.open_run(run, source).store
        if import_ is not None:
            from equicam.runs.review.verdict_files import import_verdicts

            names = reviewer or []
            if len(names) != 1 or export is not None:
                raise EquicamError(
                    "--import", "one --reviewer and no --export",
                    f"{len(names)} reviewers{' and --export' if export else ''}",
                    "--reviewer with the name of who gave the verdicts",
                )  # fmt: skip
            imported = import_verdicts(store, import_, reviewer=names[0], replace=replace)
            counts = {"taken": imported.taken, "without": imported.without, "already": imported.already}
            answer("review", {"run": str(run), "imported": counts, "exported": None})
            say(imported.sentence)
            return
        if blind_class and not blinding:
            raise EquicamError("--blind-class", "blinding", "--no-blinding", "one of the two")
        if replace:
            raise EquicamError("--replace", "--import", "none", "--import FILE")
        if export is not None:
            from equicam.runs.review.verdict_files import write_verdicts

            count = write_verdicts(store, export)
            answer(
                "review",
                {"run": str(run), "imported": None, "exported": {"verdicts": count, "file": str(export)}},
            )
            say(f"{count:,} verdicts: {export}")
            return
        if output.json:
            raise EquicamError("--json", "--import or --export", "neither", "no --json")
        with needing_web_server("equicam review"):
            from equicam.runs.review.app import serve_review
        serve_review(
            store, reviewers=reviewer or (), blind=blinding, blind_class=blind_class, port=port,
            announce=lambda links: announce_page(
                "review", links, "Ctrl-C stops the page; every verdict is saved the moment it is given.", browser=browser
            ),
        )  # fmt: skip
