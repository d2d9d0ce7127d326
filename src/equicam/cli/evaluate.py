"""`equicam evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from equicam.cli import options
from equicam.cli.shared import (
    console,
    exit_on_error,
    load_on_engine,
    parse_dtype,
    parse_views,
    say,
    split_commas,
)


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
    as_published: options.AsPublished = False,
    dtype: options.Dtype = None,
    compile_: options.Compile = False,
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
    row with a reason.

    Example: `equicam evaluate val/ --model resnet50 --n 200 --scores eq,insertion --out eq.parquet`
    """
    resume = f"; finished shards are in {out}.shards, and the same command resumes" if out else ""
    with exit_on_error(interrupted=resume):
        from dataclasses import replace

        import equicam
        from equicam.report.tables import evaluation_tables

        loaded, chosen = load_on_engine(
            model, weights, classes, layer, compile_, device=device, engine=engine, address=address, actors=actors
        )  # fmt: skip
        rows = equicam.evaluate(
            replace(loaded, name=model), source, methods=split_commas(methods) or [], scores=split_commas(scores) or [],
            n=n, split=split, views=parse_views(views), group=group,
            fill=fill,  # type: ignore[arg-type]
            context=context,
            as_published=as_published, dtype=parse_dtype(dtype), compiled=compile_, seed=seed, out=out, engine=chosen,
            progress=console.is_terminal,
        )  # fmt: skip
    for part in evaluation_tables(rows, details=details):
        console.print(part)
    if out:
        say(f"{rows.num_rows:,} rows are in {out}")
