"""`equicam evaluate`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equicam.cli import options
from equicam.cli.shared import load_on_engine, parse_speed, parse_views
from equicam.console import FAILED, answer, complain, console, exit_on_error, output, say, split_commas

if TYPE_CHECKING:
    import pyarrow as pa


def evaluate(
    source: options.Source,
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Names from `equicam methods`, separated by commas; controls like grad-cam@blur-16."
        ),
    ] = "grad-cam,equigrad-cam",
    scores: Annotated[str, typer.Option(help="Names from `equicam scores`, separated by commas.")] = "eq",
    n: options.SampleSize = None,
    split: options.Split = None,
    group_by: options.GroupBy = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Parquet file for the rows; resumed if it exists.", show_default=False),
    ] = None,
    group: Annotated[
        str, typer.Option(help="How images are presented: rotation, dihedral, scale or shift.")
    ] = "rotation",
    views: options.Views = None,
    layer: options.Layer = None,
    classes: options.Classes = None,
    fill: options.Fill = None,
    context: options.Context = "none",
    protocol: options.Protocol = "ours",
    size: options.Size = None,
    crop: options.Crop = None,
    mean: options.Mean = None,
    std: options.Std = None,
    dtype: options.Dtype = None,
    compile_: options.Compile = False,
    fast: options.Fast = False,
    seed: options.Seed = 0,
    details: Annotated[
        bool,
        typer.Option(help="Add tables by angle and condition, paired comparisons, and signals of bad maps."),
    ] = False,
    device: options.Devices = None,
    engine: options.Engine = "local",
    address: options.Address = None,
    actors: options.Actors = None,
) -> None:
    """Run the paper's protocol on your data: every method on the same images and views, with intervals and floors.

    With `--group` images are mirrored and rotated, scaled or shifted instead of rotated.

    Rows go to `--out`; an interrupted command resumes when it is run again. An image that cannot be read becomes a
    row with a reason; if none can be read, the command exits with 1.

    Example: `equicam evaluate val/ --model resnet50 --n 200 --scores eq,insertion --out eq.parquet`
    """
    resume = f"; finished shards are in {out}.shards, and the same command resumes" if out else ""
    with exit_on_error(interrupted=resume):
        from dataclasses import replace

        import equicam
        from equicam.runs.report.tables import evaluation_tables

        kind, compiled = parse_speed(fast, dtype, compile_ or None, device)
        loaded, chosen = load_on_engine(
            model, weights, classes, layer, bool(compiled), device=device, engine=engine, address=address, actors=actors,
            size=size, crop=crop, mean=mean, std=std,
        )  # fmt: skip
        rows = equicam.evaluate(
            replace(loaded, name=model), source, methods=split_commas(methods) or [], scores=split_commas(scores) or [],
            n=n, split=split, group_by=group_by, views=parse_views(views), group=group,
            fill=fill,  # type: ignore[arg-type]
            context=context,
            protocol=protocol, dtype=kind, compiled=bool(compiled), seed=seed, out=out, engine=chosen,
            progress=not output.quiet,
        )  # fmt: skip
    if output.json:
        answer("evaluate", _document(rows, out))
    else:
        for part in evaluation_tables(rows, details=details):
            console.print(part)
        if out:
            say(f"{rows.num_rows:,} rows are in {out}")
    if rows["score"].null_count == rows.num_rows:
        first = rows["reason"][0].as_py() if rows.num_rows else "no image"
        complain(f"no image could be read; the first: {first}")
        raise typer.Exit(FAILED)


def _document(rows: "pa.Table", out: Path | None) -> dict[str, Any]:
    import pyarrow.compute as pc

    from equicam.evaluate.summary import count_groups, summarise

    return {
        "out": None if out is None else str(out),
        "rows": rows.num_rows,
        "images": len(pc.unique(rows["id"])),
        "groups": count_groups(rows),
        "unreadable": rows.filter(pc.is_null(rows["score"])).num_rows,
        "summary": [asdict(line) for line in summarise(rows)],
    }
