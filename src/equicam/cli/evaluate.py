"""`equicam evaluate`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from equicam.cli import options
from equicam.cli.loading import load_on_engine
from equicam.cli.recipe_file import Settings
from equicam.console import FAILED, answer, complain, console, exit_on_error, output, say, split_commas

if TYPE_CHECKING:
    import pyarrow as pa

_METHODS = "Names from `equicam methods`, separated by commas; controls like grad-cam@blur-16."
_GROUP_BY = "Column of the image list with each image's group, such as patient: intervals are by group."
_DETAILS = "Add tables by angle and condition, paired comparisons, and signals of bad maps."


def evaluate(
    source: options.Source,
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    layer: options.Layer = None,
    methods: Annotated[
        str | None, Option(help=_METHODS, show_default="grad-cam and the recipe's, equigrad-cam")
    ] = None,
    scores: Annotated[str, Option(help="Names from `equicam scores`, separated by commas.")] = "eq",
    n: options.SampleSize = None,
    split: Annotated[
        str | None, Option(help="Split of the source: train, test, …", show_default=False)
    ] = None,
    group_by: Annotated[str | None, Option(help=_GROUP_BY, show_default="a column group")] = None,
    out: Annotated[
        Path | None, Option(help="Parquet file for the rows; resumed if it exists.", show_default=False)
    ] = None,
    group: Annotated[
        str, Option(help="How images are presented: rotation, dihedral, scale or shift.")
    ] = "rotation",
    views: options.Views = None,
    classes: options.Classes = None,
    context: options.Context = None,
    details: Annotated[bool, Option(help=_DETAILS)] = False,
    device: options.Devices = None,
    recipe: options.RecipeFile = None,
    save_recipe: options.SaveRecipe = None,
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

        settings = Settings.of(
            recipe, recipe={"views": views, "context": context}, run={"split": split},
            model={"layer": layer, "classes": split_commas(classes)},
        )  # fmt: skip
        chosen, split = settings.recipe, settings.sections["run"].get("split")
        settings.save(save_recipe)
        loaded, engine = load_on_engine(settings, model, weights, device)
        rows = equicam.evaluate(
            replace(loaded, name=model), source, recipe=chosen, methods=split_commas(methods),
            scores=split_commas(scores) or [], n=n, split=split, group_by=group_by, group=group, out=out, engine=engine,
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
