"""`equicam explain`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from equicam.cli import options
from equicam.cli.shared import (
    as_typed,
    console,
    exit_on_error,
    parse_views,
    plain,
    resolve_device,
    say,
    split_commas,
)


def explain(
    images: Annotated[list[Path], typer.Argument(help="Image files.", show_default=False)],
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    out: Annotated[Path, typer.Option(help="Folder for the PNG and JSON files.")] = Path("explained"),
    method: options.MethodName = "equigrad-cam",
    views: options.Views = None,
    target: Annotated[
        int | None, typer.Option(help="Index of the class to explain.", show_default="the top-1")
    ] = None,
    layer: options.Layer = None,
    classes: options.Classes = None,
    fill: options.Fill = None,
    tau: options.Tau = None,
    gamma: options.Gamma = None,
    as_published: options.AsPublished = False,
    device: options.Device = None,
) -> None:
    """Explain images: overlay, PEUM and view-strip PNGs, and a JSON file next to them.

    An image that cannot be read is skipped with its reason; the others are explained, and the command exits with 1.

    Example: `equicam explain scan.png --model resnet50 --views 6`
    """
    table = Table(Column("image", overflow="fold"), "class", "p", "PEUM", "flips", "flags", "files")
    skipped = 0
    with exit_on_error():
        import equicam
        from equicam.explain_files import explain_files

        ready = equicam.load(
            model, weights=weights, classes=split_commas(classes), layer=layer, device=resolve_device(device)
        )
        results = explain_files(
            ready, images, out, method=method, views=parse_views(views), target=target, fill=fill, tau=tau,
            gamma=gamma, as_published=as_published,
        )  # fmt: skip
        try:
            for result in _track(results, len(images)):
                if result.error:
                    skipped += 1
                    console.print(f"[red]skipped[/red] {escape(as_typed(result.error))}", soft_wrap=True)
                else:
                    table.add_row(*map(escape, _row(result.path, result.facts, result.stem)))
        finally:
            if table.row_count:
                console.print(table)
                say(f"files are in {out}")
    console.print(f"layer {ready.layer}")
    if views == "auto" and table.row_count > 1:
        say("PEUM over different numbers of views does not rank images; to rank, give --views a number")
    if skipped:
        say(f"{skipped} of {len(images)} images skipped")
        raise typer.Exit(1)


def _track(results: Any, total: int) -> Any:
    from rich.progress import track

    return track(results, "explaining", total, console=console, transient=True, disable=total < 2)


def _row(path: Path, facts: dict[str, Any], stem: str) -> tuple[str, ...]:
    flips = f"{sum(facts['view_flips'])} of {len(facts['view_flips'])}"
    flags = ", ".join(facts["flags"]) or "none"
    return (
        plain(path.name), facts["class"], f"{facts['confidence']:.2f}", f"{facts['peum_score']:.4f}", flips, flags, f"{stem}.*",
    )  # fmt: skip
