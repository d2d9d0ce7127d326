"""`equicam explain`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table
from typer import Argument, Option

from equicam.cli import options
from equicam.cli.loading import load_here
from equicam.cli.recipe_file import Settings
from equicam.cli.run_output import format_value
from equicam.console import (
    FAILED,
    answer,
    as_typed,
    complain,
    console,
    exit_on_error,
    note,
    plain,
    say,
    show_progress,
    split_commas,
)

if TYPE_CHECKING:
    from equicam.explain_files import ExplainedFile


def explain(
    images: Annotated[list[Path], Argument(help="Image files.", show_default=False)],
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    layer: options.Layer = None,
    out: Annotated[Path, Option(help="Folder for the PNG and JSON files.")] = Path("explained"),
    method: options.MethodName = None,
    views: options.Views = None,
    target: options.Target = None,
    classes: options.Classes = None,
    context: options.Context = None,
    device: options.Device = None,
    recipe: options.RecipeFile = None,
    save_recipe: options.SaveRecipe = None,
) -> None:
    """Explain images: PNGs of overlay, PEUM (uncertainty: variance of the views' maps) and views, and a JSON file each.

    An image that cannot be read is skipped with its reason; the others are explained, and the command exits with 1.

    Example: `equicam explain scan.png --model resnet50 --views 6`
    """
    table = Table(Column("image", overflow="fold"), "class", "p", "map", "PEUM", "flips", "flags")
    explained: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    with exit_on_error(), show_progress("explaining", len(images)) as progress:
        from equicam.explain_files import explain_files
        from equicam.models.preprocessing import preprocessing_facts
        from equicam.readers.names import class_index
        from equicam.reasons import PEUM_NOTE

        settings = Settings.of(
            recipe, recipe={"method": method, "views": views, "context": context},
            model={"layer": layer, "classes": split_commas(classes)},
        )  # fmt: skip
        chosen, window = settings.recipe, settings.voi
        settings.save(save_recipe)
        ready = load_here(settings, model, weights, device)
        if not ready.has_probabilities:
            table.columns[1].header, table.columns[2].header = "output", "value"
        of_class = class_index(target, ready.classes)
        results = explain_files(ready, images, out, recipe=chosen, target=of_class, voi=window)
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
    facts, flips, p = result.facts, result.facts["view_flips"], result.facts["confidence"]
    peum = "–" if facts["peum_score"] is None else f"{facts['peum_score']:.4f}"
    return (
        plain(result.path.name), facts["class"], format_value(p, facts["output"]), facts["steadiness"], peum,
        "–" if p is None or len(flips) < 2 else f"{sum(flips)} of {len(flips) - 1}", ", ".join(facts["flags"]) or "none",
    )  # fmt: skip
