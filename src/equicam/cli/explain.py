"""`equicam explain`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from equicam.explain_files import ExplainedFile


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
    context: options.Context = "none",
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
        from rich.progress import track

        import equicam
        from equicam.explain_files import explain_files

        ready = equicam.load(
            model, weights=weights, classes=split_commas(classes), layer=layer, device=resolve_device(device)
        )
        results = explain_files(
            ready, images, out, method=method, views=parse_views(views), target=target, fill=fill, context=context, tau=tau,
            gamma=gamma, as_published=as_published,
        )  # fmt: skip
        try:
            for result in track(
                results, "explaining", len(images), console=console, transient=True, disable=len(images) < 2
            ):
                if result.error:
                    skipped += 1
                    console.print(f"[red]skipped[/red] {escape(as_typed(result.error))}", soft_wrap=True)
                else:
                    table.add_row(*map(escape, _row(result)))
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


def _row(result: "ExplainedFile") -> tuple[str, ...]:
    facts, flips = result.facts, result.facts["view_flips"]
    return (
        plain(result.path.name), facts["class"], "–" if facts["confidence"] is None else f"{facts['confidence']:.2f}", f"{facts['peum_score']:.4f}",
        f"{sum(flips)} of {len(flips)}", ", ".join(facts["flags"]) or "none", f"{result.stem}.*",
    )  # fmt: skip
