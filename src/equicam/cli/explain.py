"""`equicam explain`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from equicam.cli import options
from equicam.cli.shared import parse_views, parse_window, set_preprocessing
from equicam.console import (
    FAILED,
    answer,
    as_typed,
    complain,
    console,
    exit_on_error,
    note,
    plain,
    resolve_device,
    say,
    show_progress,
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
        str | None, typer.Option(help="Class to explain, by name or number.", show_default="the top-1")
    ] = None,
    layer: options.Layer = None,
    classes: options.Classes = None,
    fill: options.Fill = None,
    context: options.Context = "none",
    tau: options.Tau = None,
    gamma: options.Gamma = None,
    protocol: options.Protocol = "ours",
    size: options.Size = None,
    crop: options.Crop = None,
    mean: options.Mean = None,
    std: options.Std = None,
    voi: options.Voi = None,
    device: options.Device = None,
) -> None:
    """Explain images: PNGs of overlay, PEUM (uncertainty: variance of the views' maps) and views, and a JSON file each.

    An image that cannot be read is skipped with its reason; the others are explained, and the command exits with 1.

    Example: `equicam explain scan.png --model resnet50 --views 6`
    """
    table = Table(Column("image", overflow="fold"), "class", "p", "map", "PEUM", "flips", "flags")
    explained: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    with exit_on_error(), show_progress("explaining", len(images)) as progress:
        import equicam
        from equicam.explain_files import explain_files
        from equicam.models.preprocessing import preprocessing_facts
        from equicam.readers.names import class_index
        from equicam.reasons import PEUM_NOTE

        window = parse_window(voi)
        ready = equicam.load(
            model, weights=weights, classes=split_commas(classes), layer=layer, device=resolve_device(device)
        )
        ready = set_preprocessing(ready, size, crop, mean, std)
        if not ready.has_probabilities:
            table.columns[1].header, table.columns[2].header = "output", "value"
        results = explain_files(
            ready, images, out, method=method, views=parse_views(views), target=class_index(target, ready.classes), fill=fill, context=context, tau=tau,
            gamma=gamma, protocol=protocol, voi=window,
        )  # fmt: skip
        try:
            for result in results:
                progress.advance(1)
                if result.error:
                    skipped.append({"image": str(result.path), "error": as_typed(result.error)})
                    complain(f"skipped: {skipped[-1]['error']}")
                else:
                    explained.append(result.facts)
                    table.add_row(*map(escape, _row(result)))
        finally:
            if table.row_count:
                say(PEUM_NOTE)
                console.print(table)
                for one in explained:
                    say(f"{Path(one['image']).name}: {one['steadiness']}: {one['steadiness_reason']}")
                say(f"files are in {out}")
        facts = preprocessing_facts(ready)
    found = {"out": str(out), "model": model, "layer": ready.layer, "preprocessing": facts}
    answer("explain", found | {"images": explained, "skipped": skipped})
    note(f"layer {ready.layer}")
    if skipped:
        complain(f"{len(skipped)} of {len(images)} images skipped")
        raise typer.Exit(FAILED)


def _row(result: "ExplainedFile") -> tuple[str, ...]:
    facts, flips = result.facts, result.facts["view_flips"]
    p, value = facts["confidence"], facts["output"]
    shown = (
        f"{p:.2f}" if p is not None else "–" if value is None else f"{value:.4g}"
    )  # a value has no confidence
    peum = "–" if facts["peum_score"] is None else f"{facts['peum_score']:.4f}"
    return (
        plain(result.path.name), facts["class"], shown, facts["steadiness"], peum,
        "–" if p is None or len(flips) < 2 else f"{sum(flips)} of {len(flips) - 1}", ", ".join(facts["flags"]) or "none",
    )  # fmt: skip
