"""The command `equicam-paper`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD, Box
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from equicam.console import (
    answer,
    console,
    exit_on_error,
    note,
    output,
    parse_dtype,
    resolve_device,
    say,
    split_commas,
    with_output_options,
)
from equicam.errors import EquicamError
from equicam_paper import EXPERIMENTS, load_experiment

if TYPE_CHECKING:
    from equicam_paper.reproduce import Reproduction
    from equicam_paper.rows import Row
    from equicam_paper.tables import Matrix

Device = Annotated[str | None, Option(help="cpu, cuda or cuda:1.", show_default="a GPU if there is one")]
COLOURS = {
    "matches": "green",
    "differs": "red",
    "artefact": "magenta",
    "undecided": "yellow",
    "by definition": "none",
    "measured": "none",
}


def reproduce(
    name: Annotated[str | None, Argument(help="Name from --list, or all.")] = None,
    data: Annotated[
        str | None,
        Option(help="Source of the images, as `equicam evaluate` takes it, or a published data set."),
    ] = None,
    model: Annotated[str, Option(help="Name from `equicam models`, or FILE.py:FACTORY.")] = "resnet50",
    weights: Annotated[
        str | None,
        Option(help="Weights file, name of published weights, or random.", show_default="published weights"),
    ] = None,
    backbone: Annotated[
        str | None,
        Option(
            help="Network whose published numbers to compare with: resnet50, vgg16 or vit_b_16.",
            show_default="--model",
        ),
    ] = None,
    domain: Annotated[
        str, Option(help="Domain of the domain tables: PatchCamelyon or RESISC45.", show_default=False)
    ] = "",
    n: Annotated[
        int | None, Option(help="Take this many images, spread over the classes.", show_default="all")
    ] = None,
    split: Annotated[str | None, Option(help="Split of the source: train, test, …")] = None,
    draw: Annotated[
        str,
        Option(
            help="authors: the images that the authors' loader draws, of 15 per class.",
            show_default="class-spread",
        ),
    ] = "",
    group_by: Annotated[
        str | None,
        Option(
            help="Column of the image list with each image's group: intervals are by group.",
            show_default="a column group",
        ),
    ] = None,
    extra: Annotated[
        list[str] | None, Option(help="More weights, each under its name: rotated=FILE, seed1=FILE.")
    ] = None,
    classes: Annotated[
        str | None, Option(help="Class names of a zero-shot model, separated by commas.")
    ] = None,
    costly: Annotated[bool, Option(help="Include methods with hundreds of passes per map.")] = False,
    max_passes: Annotated[
        int | None,
        Option(
            min=1, help="With --costly, leave out methods with more passes per map.", show_default="no limit"
        ),
    ] = None,
    only: Annotated[str | None, Option(help="With all: these experiments, separated by commas.")] = None,
    minutes: Annotated[
        float | None, Option(min=0.0, help="With all: stop after this time; the same command resumes.")
    ] = None,
    page: Annotated[
        Path | None, Option(help="Write this page from the rows in --rows, with its plots; runs nothing.")
    ] = None,
    rows: Annotated[
        Path | None,
        Option(help="Folder of kept rows, FOLDER/NETWORK/NAME.json: read by --page, written by all."),
    ] = None,
    dtype: Annotated[
        str | None,
        Option(help="Run the network in bfloat16 or float16.", show_default="the type of the weights"),
    ] = None,
    compile_: Annotated[
        bool, Option("--compile", help="Compile the network first to run it faster.")
    ] = False,
    out: Annotated[Path, Option(help="Folder for rows and figures; resumed if it exists.")] = Path(
        "reproduced"
    ),
    device: Device = None,
    list_: Annotated[
        bool, Option("--list", help="List every table and figure, or with NAME its claims.")
    ] = False,
) -> None:
    """Reproduce a table, figure or claim of the paper: published, by the authors' protocol, and by ours.

    Example: `equicam-paper reproduce main --data imagenet/val --n 1000`
    """
    if page is not None:
        _write_page(page, rows)
        return
    if name is None or (list_ and name == "all"):
        _print_experiments()
        return
    if list_:
        with exit_on_error():
            _print_claims(name)
        return
    with exit_on_error(interrupted="; the same command resumes"):
        from equicam_paper.reproduce import parse_extra
        from equicam_paper.reproduce import reproduce as run_experiment

        chosen: dict[str, Any] = {
            "model": model, "weights": weights, "classes": split_commas(classes), "device": resolve_device(device),
            "backbone": backbone, "domain": domain, "n": n, "split": split, "draw": draw, "group_by": group_by, "costly": costly,
            "max_passes": max_passes, "extra": dict(map(parse_extra, extra or ())),
            "options": {"dtype": parse_dtype(dtype), "compiled": compile_}, "progress": not output.quiet,
            "warn": lambda line: note(line, style="yellow"),
        }  # fmt: skip
        if name == "all":
            _run_all(data, out, chosen, only=split_commas(only) or (), minutes=minutes, rows=rows)
            return
        result = run_experiment(name, data, out, **chosen)
    found = [row.as_json() for row in result.rows]
    facts = {"title": result.title, "path": str(result.path), "provenance": dict(result.provenance)}
    answer("reproduce", facts | {"rows": found})
    _print_rows(result)


def _run_all(
    data: str | None,
    out: Path,
    chosen: dict[str, Any],
    *,
    only: Sequence[str],
    minutes: float | None,
    rows: Path | None,
) -> None:
    """Every experiment of one network, a line each; the status is 1 if one failed."""
    from equicam_paper.reproduce import no_data, open_context, run_all

    until = None if minutes is None else monotonic() + 60 * minutes
    if data is None:
        raise no_data("all")
    done = []
    for one in run_all(open_context(data, out, **chosen), only, until=until, rows=rows, progress=note):
        say(f"{one.name:24}{one.seconds:8.0f} s  {one.reason or one.path or 'evaluation kept'}")
        done.append(asdict(one) | {"path": None if one.path is None else str(one.path)})
    answer("reproduce", {"outcomes": done})
    if any(one["reason"] for one in done):
        raise typer.Exit(1)


def _write_page(page: Path, rows: Path | None) -> None:
    with exit_on_error():
        from equicam_paper.page import write_page

        if rows is None:
            raise EquicamError(
                "--page", "a folder of kept rows", "no --rows", f"--page {page} --rows docs/reproduce/rows"
            )
        counts = write_page(page, rows)
    answer("reproduce", {"page": str(page), "claims": counts})
    say(f"{page}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _print_experiments() -> None:
    listed = []
    table = Table("name", "claims", "title", "needs", box=None)
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        count = len(experiment.claims)
        table.add_row(name, str(count or ""), experiment.title, experiment.needs)
        listed.append({"name": name, "claims": count, "title": experiment.title, "needs": experiment.needs})
    answer("reproduce", {"experiments": listed})
    console.print(table)
    say(
        "equicam-paper reproduce NAME --list: the claims of one; a claim that two experiments answer counts with both"
    )


def _print_claims(name: str) -> None:
    """What an experiment answers: every claim with what it is about and the published number."""
    from equicam_paper.margins import published_text
    from equicam_paper.reproduce import find_experiment

    listed = [
        {
            "claim": one.id,
            "about": one.of,
            "method": one.method,
            "metric": one.metric,
            "published": published_text(one.id),
        }
        for one in find_experiment(name).claims.values()
    ]
    answer("reproduce", {"name": name, "claims": listed})
    if not listed:
        say(f"{name} answers no claim: the paper has no numbers for it")
        return
    table = _folding_table("claim", "about", "method", "metric", "published", box=None)
    for one in listed:
        table.add_row(*map(escape, one.values()))
    console.print(table)


def _folding_table(*columns: str, box: Box | None = SIMPLE_HEAD, title: str = "") -> Table:
    """A table that folds what is too long and cuts nothing."""
    table = Table(box=box, title=title or None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_rows(result: "Reproduction") -> None:
    from equicam.evaluate import summary
    from equicam_paper.tables import random_weights_tables

    measured = [row for row in result.rows if row.verdict != "not run"]
    if matrices := random_weights_tables(measured):
        _print_matrices(result.title, matrices)
        notes = []
    else:
        _print_claimed(result.title, measured)
        notes = [f"{row.label}: {row.note}" for row in measured if row.note]
    for line in (*summary.groups_remark(result.groups), *notes):
        say(f"  {line}")
    if skipped := len(result.rows) - len(measured):
        note(
            f"{skipped} claims not run; {result.path.with_suffix('.csv')} says of each why, or with which options it runs"
        )


def _print_claimed(title: str, rows: Sequence["Row"]) -> None:
    """A line per row: the published number, the measured ones and the verdict."""
    from equicam_paper.tables import interval

    table = _folding_table("row", "published", "by their protocol", "by ours", "verdict", title=title)
    for row in rows:
        values = map(interval, (row.as_published, row.clean))
        colour = COLOURS[row.verdict]
        cells = map(escape, (row.label, row.published, *values))
        table.add_row(*cells, f"[{colour}]{row.verdict}[/{colour}]")
    console.print(table)


def _print_matrices(title: str, matrices: Sequence["Matrix"]) -> None:
    """A table for each measure, a line per method, whose name is never folded."""
    say(title)
    for matrix in matrices:
        table = _folding_table("method", *matrix.columns, title=matrix.title)
        table.columns[0].no_wrap = True
        for name, cells in matrix.rows.items():
            table.add_row(name, *cells)
        console.print(table)


def finetune(
    data: Annotated[str, Argument(help="Labelled source with splits.", show_default=False)],
    out: Annotated[Path, Option(help="Folder for weights, model card and checkpoint; resumed if it exists.")],
    arch: Annotated[str, Option(help="Name from `equicam models`, or FILE.py:FACTORY.")] = "resnet50",
    weights: Annotated[
        str | None, Option(help="Weights file to start from.", show_default="published weights")
    ] = None,
    train: Annotated[str | None, Option(help="Split to train on.")] = "train",
    test: Annotated[str | None, Option(help="Split to measure accuracy on.")] = "test",
    epochs: Annotated[int, Option(min=1, help="Largest number of epochs.")] = 10,
    batch: Annotated[int, Option(min=1, help="Images per step.")] = 32,
    rate: Annotated[float, Option(help="Highest learning rate.")] = 1e-4,
    patience: Annotated[int, Option(min=1, help="Epochs without improvement before training stops.")] = 3,
    seed: Annotated[int, Option(help="Seed of every random choice.")] = 0,
    rotation_augment: Annotated[bool, Option(help="Rotate training images by random angles.")] = False,
    workers: Annotated[int, Option(min=0, help="Processes that decode images.")] = 2,
    device: Device = None,
) -> None:
    """Fine-tune a classifier on your domain: weights for `--weights`, and a model card next to them.

    Example: `equicam-paper finetune tiles/ --arch resnet50 --rotation-augment --out models/rotated`
    """
    with exit_on_error():
        from equicam_paper.finetune import finetune as train_classifier

        path, measured = train_classifier(
            data, arch, out, weights=weights, train=train, test=test, epochs=epochs, batch=batch, rate=rate,
            patience=patience, seed=seed, rotation_augment=rotation_augment, workers=workers,
            device=resolve_device(device), progress=note,
        )  # fmt: skip
    answer("finetune", {"weights": str(path)} | asdict(measured))
    say(
        f"accuracy {measured.accuracy:.3f}, balanced {measured.balanced:.3f} on {measured.images} test images"
    )
    say(f"weights and card: {path}")


app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
for command in (reproduce, finetune):
    app.command()(with_output_options(command, answers=True))


@app.callback()
def main() -> None:
    """The experiments of the paper behind equicam, and the fine-tuning that they need."""
