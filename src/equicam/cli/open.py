"""`equicam open`."""

from pathlib import Path
from typing import Annotated

import typer

from equicam.cli import options
from equicam.cli.recipe_file import Settings
from equicam.cli.shared import announce_page, load_here, needing_web_server
from equicam.console import exit_on_error, split_commas
from equicam.errors import EquicamError


def open(  # noqa: A001  # the command's name
    images: Annotated[
        list[Path] | None,
        typer.Argument(help="Image files; others can be dropped on the page.", show_default=False),
    ] = None,
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    layer: options.Layer = None,
    method: options.MethodName = None,
    views: Annotated[int, typer.Option(min=2, max=72, help="Number of views.")] = 18,
    classes: options.Classes = None,
    device: options.Device = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with method, model and preprocessing; options typed here win.", show_default=False
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the page.", show_default="8322, or a free one"),
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
        with needing_web_server("equicam open"):
            from equicam.live.app import serve_live
        settings = Settings.of(
            recipe, recipe={"method": method}, model={"layer": layer, "classes": split_commas(classes)}
        )
        serve_live(
            load_here(settings, model, weights, device), paths, method=settings.recipe.method, views=views, port=port,
            announce=lambda links: announce_page("live", links, "Ctrl-C stops the page.", browser=browser),
        )  # fmt: skip
