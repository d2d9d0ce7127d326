"""The commands that serve a page: open and review, which never imports torch."""

import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from equicam.cli import options
from equicam.cli.loading import load_here
from equicam.cli.recipe_file import Settings
from equicam.console import answer, exit_on_error, note, output, say, split_commas
from equicam.errors import EquicamError, needing

if TYPE_CHECKING:
    from equicam.runs.review.server import Links

_RECIPE = "TOML file with method, model and preprocessing; options typed here win."
_LIVE_PORT, _REVIEW_PORT = "8322, or a free one", "8321, or a free one"
_REVIEWER = "Name of the reviewer. Given several times: a personal link for each."
_BLINDING = "Hide label, confidence and signals of an image until the first verdict on it."
_IMPORT = "Take the verdicts in a GeoJSON file of QuPath or QGIS, under the name of --reviewer, and exit."
_REPLACE = "With --import: verdicts may replace that reviewer's earlier ones."


def open(  # noqa: A001  # the command's name
    images: Annotated[
        list[Path] | None,
        Argument(help="Image files; others can be dropped on the page.", show_default=False),
    ] = None,
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    layer: options.Layer = None,
    method: options.MethodName = None,
    views: Annotated[int, Option(min=2, max=72, help="Number of views.")] = 18,
    classes: options.Classes = None,
    device: options.Device = None,
    recipe: Annotated[Path | None, Option(help=_RECIPE, show_default=False)] = None,
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Port of the page.", show_default=_LIVE_PORT)
    ] = None,
    browser: options.Browser = True,
) -> None:
    """Look at maps live: a page where you rotate an image and see which maps follow it.

    Nothing is written to disk, and other machines cannot reach the page.

    Example: `equicam open scan.png --model resnet50`
    """
    with exit_on_error():
        paths = images or []
        for path in paths:
            if not path.is_file():
                raise EquicamError(f"image {str(path)!r}", "an existing file", "none", "its full path")
        with needing("review", "equicam open"):
            from equicam.live.app import serve_live
        settings = Settings.of(
            recipe, recipe={"method": method}, model={"layer": layer, "classes": split_commas(classes)}
        )
        serve_live(
            load_here(settings, model, weights, device), paths, method=settings.recipe.method, views=views, port=port,
            announce=lambda links: _announce("live", links, "Ctrl-C stops the page.", browser=browser),
        )  # fmt: skip


def review(
    run: options.RunFolder,
    reviewer: Annotated[list[str] | None, Option(help=_REVIEWER, show_default="the login name")] = None,
    blinding: Annotated[bool, Option(help=_BLINDING)] = True,
    blind_class: Annotated[
        bool, Option("--blind-class", help="Also hide the class that the map explains.")
    ] = False,
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Port of the page.", show_default=_REVIEW_PORT)
    ] = None,
    browser: options.Browser = True,
    source: options.MovedSource = None,
    export: Annotated[
        Path | None,
        Option(help="Write all verdicts to this .csv or .json file and exit.", show_default=False),
    ] = None,
    import_: Annotated[Path | None, Option("--import", help=_IMPORT, show_default=False)] = None,
    replace: Annotated[bool, Option("--replace", help=_REPLACE)] = False,
) -> None:
    """Give verdicts on the queue of a run, in the browser, by keyboard.

    Example: `equicam review run --reviewer ana`, or `equicam review run --export verdicts.csv`
    """
    with exit_on_error():
        import equicam

        store, names = equicam.open_run(run, source).store, reviewer or []
        if import_ is not None:
            from equicam.runs.review.verdict_files import import_verdicts

            if len(names) != 1 or export is not None:
                raise EquicamError(
                    "--import", "one --reviewer and no --export",
                    f"{len(names)} reviewers{' and --export' if export else ''}",
                    "--reviewer with the name of who gave the verdicts",
                )  # fmt: skip
            imported = import_verdicts(store, import_, reviewer=names[0], replace=replace)
            counts = {name: getattr(imported, name) for name in ("taken", "without", "already")}
            answer("review", {"run": str(run), "imported": counts, "exported": None})
            say(imported.sentence)
            return
        if blind_class and not blinding:
            raise EquicamError("--blind-class", "blinding", "--no-blinding", "one of the two")
        if replace:
            raise EquicamError("--replace", "--import", "none", "--import FILE")
        if export is not None:
            from equicam.runs.review.verdict_files import write_verdicts

            exported = {"verdicts": write_verdicts(store, export), "file": str(export)}
            answer("review", {"run": str(run), "imported": None, "exported": exported})
            say(f"{exported['verdicts']:,} verdicts: {export}")
            return
        if output.json:
            raise EquicamError("--json", "--import or --export", "neither", "no --json")
        with needing("review", "equicam review"):
            from equicam.runs.review.app import serve_review
        ending = "Ctrl-C stops the page; every verdict is saved the moment it is given."
        serve_review(
            store, reviewers=names, blind=blinding, blind_class=blind_class, port=port,
            announce=lambda links: _announce("review", links, ending, browser=browser),
        )  # fmt: skip


def _announce(name: str, links: "Links", ending: str, *, browser: bool) -> None:
    """Print the addresses of a page and how it ends, and open the one for everybody in a browser."""
    for reviewer, address in links.items():
        say(f"{name}: {address}" if reviewer is None else f"{name} as {reviewer}: {address}")
    note(ending)
    if browser and None in links:
        threading.Thread(target=webbrowser.open, args=(links[None],), daemon=True).start()
