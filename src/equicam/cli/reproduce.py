"""`equicam reproduce`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from equicam.cli import options
from equicam.cli.output import answer, console, note, output, say
from equicam.cli.shared import exit_on_error, parse_dtype, resolve_device, split_commas
from equicam.paper import EXPERIMENTS, load_experiment

if TYPE_CHECKING:
    from equicam.paper.reproduce import Reproduction

COLOURS = {
    "matches": "green",
    "differs": "red",
    "artefact": "magenta",
    "undecided": "yellow",
    "measured": "none",
}


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Name from --list.", show_default=False)] = None,
    data: Annotated[
        str | None, typer.Option(help="Source of the images, as `evaluate` takes it.", show_default=False)
    ] = None,
    model: options.ModelName = "resnet50",
    weights: options.Weights = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Network whose published numbers to compare with: resnet50, vgg16 or vit_b_16.",
            show_default="--model",
        ),
    ] = None,
    domain: Annotated[
        str, typer.Option(help="Domain of the domain tables: PatchCamelyon or RESISC45.", show_default=False)
    ] = "",
    n: options.SampleSize = None,
    split: options.Split = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(help="More weights, each under its name: rotated=FILE, seed1=FILE.", show_default=False),
    ] = None,
    classes: options.Classes = None,
    costly: Annotated[bool, typer.Option(help="Include methods with hundreds of passes per map.")] = False,
    dtype: options.Dtype = None,
    compile_: options.Compile = False,
    out: Annotated[Path, typer.Option(help="Folder for rows and figures; resumed if it exists.")] = Path(
        "reproduced"
    ),
    device: options.Device = None,
    list_: Annotated[bool, typer.Option("--list", help="List every table, figure and claim.")] = False,
) -> None:
    """Reproduce a table, figure or claim of the paper: published, by the authors' protocol, and by ours.

    Example: `equicam reproduce main --data imagenet/val --n 1000`
    """
    if list_ or name is None:
        _print_experiments()
        return
    with exit_on_error(interrupted="; the same command resumes"):
        from equicam.paper.reproduce import parse_extra
        from equicam.paper.reproduce import reproduce as run_experiment

        result = run_experiment(
            name, data, out, model=model, weights=weights, classes=split_commas(classes), device=resolve_device(device),
            backbone=backbone, domain=domain, n=n, split=split, costly=costly, extra=dict(map(parse_extra, extra or ())),
            options={"dtype": parse_dtype(dtype), "compiled": compile_}, progress=not output.quiet,
            warn=lambda line: note(line, style="yellow"),
        )  # fmt: skip
    rows = [row.as_json() for row in result.rows]
    answer("reproduce", {"title": result.title, "path": str(result.path), "rows": rows})
    _print_rows(result)


def _print_experiments() -> None:
    from equicam.paper.claims import claims

    listed = []
    table = Table("name", "claims", "title", "needs", box=None)
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        count = sum(claim.startswith(experiment.answers) for claim in claims()) if experiment.answers else 0
        table.add_row(name, str(count or ""), experiment.title, experiment.needs)
        listed.append({"name": name, "claims": count, "title": experiment.title, "needs": experiment.needs})
    answer("reproduce", {"experiments": listed})
    console.print(table)


def _print_rows(result: "Reproduction") -> None:
    from equicam.report.tables import estimate

    columns = ("row", "published", "by their protocol", "by ours", "verdict")
    table = Table(*columns, box=SIMPLE_HEAD, title=result.title)
    measured = [row for row in result.rows if row.verdict != "not run"]
    for row in measured:
        values = [estimate(value) if value else "" for value in (row.as_published, row.clean)]
        colour = COLOURS[row.verdict]
        cells = map(escape, (row.label, row.published, *values))
        table.add_row(*cells, f"[{colour}]{row.verdict}[/{colour}]")
    console.print(table)
    for row in measured:
        if row.note:
            say(f"  {row.label}: {row.note}")
    if skipped := len(result.rows) - len(measured):
        note(f"{skipped} claims not run; {result.path} names the command that runs each")
