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
    from equicam_paper.context import Context
    from equicam_paper.reproduce import Reproduction
    from equicam_paper.rows import Row
    from equicam_paper.tables import Matrix

PUBLISHED = "published weights"
COLOURS = {"matches": "green", "differs": "red", "artefact": "magenta", "undecided": "yellow"}


def _option(help_: str, shown: str | bool = True, *flags: str, **limits: Any) -> Any:
    """An option with its help, and what is shown as its default."""
    return Option(*flags, help=help_, show_default=shown, **limits)


Device = Annotated[str | None, _option("cpu, cuda or cuda:1.", "a GPU if there is one")]


def reproduce(
    name: Annotated[str | None, Argument(help="Name from --list, or all.")] = None,
    data: Annotated[str | None, _option("As `equicam evaluate` takes it, or a published set.")] = None,
    model: Annotated[str, _option("Name from `equicam models`, or FILE.py:FACTORY.")] = "resnet50",
    weights: Annotated[str | None, _option("Weights file, published name, or random.", PUBLISHED)] = None,
    backbone: Annotated[str | None, _option("Network of the published numbers.", "--model")] = None,
    domain: Annotated[str, _option("Domain of the domain tables: PatchCamelyon or RESISC45.", False)] = "",
    n: Annotated[int | None, _option("Take this many images, spread over the classes.", "all")] = None,
    split: Annotated[str | None, _option("Split of the source: train, test, …")] = None,
    draw: Annotated[str, _option("authors: the images that their loader draws.", "class-spread")] = "",
    group_by: Annotated[str | None, _option("Column with the groups that intervals are by.", "group")] = None,
    extra: Annotated[list[str] | None, _option("More weights by name: rotated=FILE, seed1=FILE.")] = None,
    classes: Annotated[str | None, _option("Class names of a zero-shot model, separated by commas.")] = None,
    costly: Annotated[bool, _option("Include methods with hundreds of passes per map.")] = False,
    max_passes: Annotated[int | None, _option("With --costly: most passes per map.", "any", min=1)] = None,
    only: Annotated[str | None, _option("With all: these experiments, separated by commas.")] = None,
    minutes: Annotated[float | None, _option("With all: stop then; it can be resumed.", min=0.0)] = None,
    page: Annotated[Path | None, _option("Write this page from --rows, with plots; run nothing.")] = None,
    rows: Annotated[Path | None, _option("FOLDER/NETWORK/NAME.json: read by --page, written by all.")] = None,
    dtype: Annotated[str | None, _option("Compute in bfloat16 or float16.", "that of the weights")] = None,
    compile_: Annotated[bool, _option("Compile the network to run it faster.", True, "--compile")] = False,
    out: Annotated[Path, _option("Folder for rows and figures; resumed if it exists.")] = Path("reproduced"),
    device: Device = None,
    list_: Annotated[bool, _option("List every table and figure, or NAME's claims.", True, "--list")] = False,
) -> None:
    """Reproduce a table, figure or claim of the paper: published, by the authors' protocol, and by ours.

    Example: `equicam-paper reproduce main --data imagenet/val --n 1000`
    """
    if page is not None:
        _write_page(page, rows)
    elif name is None or (list_ and name == "all"):
        _print_experiments()
    elif list_:
        _print_claims(name)
    else:
        chosen: dict[str, Any] = {
            "model": model, "weights": weights, "classes": split_commas(classes), "backbone": backbone, "domain": domain,
            "n": n, "split": split, "draw": draw, "group_by": group_by, "costly": costly, "max_passes": max_passes,
            "progress": not output.quiet, "warn": lambda line: note(line, style="yellow"),
        }  # fmt: skip
        with exit_on_error(interrupted="; the same command resumes"):
            from equicam_paper.reproduce import open_context, parse_extra, refuse_unknown, run_experiment

            refuse_unknown(name, data)
            chosen |= {"device": resolve_device(device), "extra": dict(map(parse_extra, extra or ()))}
            chosen["options"] = {"dtype": parse_dtype(dtype), "compiled": compile_}
            context = open_context(str(data), out, **chosen)
            if name == "all":
                _run_all(context, split_commas(only) or (), minutes, rows)
            else:
                _print_rows(run_experiment(name, context))


def _run_all(context: "Context", only: Sequence[str], minutes: float | None, rows: Path | None) -> None:
    """Every experiment of one network, a line each; the status is 1 if one failed."""
    from equicam_paper.reproduce import run_all

    until = None if minutes is None else monotonic() + 60 * minutes
    done = []
    for one in run_all(context, only, until=until, rows=rows, progress=note):
        say(f"{one.name:24}{one.seconds:8.0f} s  {one.reason or one.path or 'evaluation kept'}")
        done.append(asdict(one) | {"path": None if one.path is None else str(one.path)})
    answer("reproduce", {"outcomes": done})
    if any(one["reason"] for one in done):
        raise typer.Exit(1)


def _write_page(page: Path, rows: Path | None) -> None:
    with exit_on_error():
        from equicam_paper.page import write_page

        if rows is None:
            fix = f"--page {page} --rows docs/reproduce/rows"
            raise EquicamError("--page", "a folder of kept rows", "no --rows", fix)
        counts = write_page(page, rows)
    answer("reproduce", {"page": str(page), "claims": counts})
    say(f"{page}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _print_experiments() -> None:
    columns, listed = ("name", "claims", "title", "needs"), []
    table = Table(*columns, box=None)
    for name in EXPERIMENTS:
        one = load_experiment(name)
        listed.append(dict(zip(columns, (name, len(one.claims), one.title, one.needs), strict=True)))
        table.add_row(name, str(len(one.claims) or ""), one.title, one.needs)
    answer("reproduce", {"experiments": listed})
    console.print(table)
    say("equicam-paper reproduce NAME --list: the claims of one; one that two answer counts with both")


def _print_claims(name: str) -> None:
    """What an experiment answers: every claim with what it is about and the published number."""
    with exit_on_error():
        from equicam_paper.margins import published_text
        from equicam_paper.reproduce import refuse_unknown

        refuse_unknown(name, "")
        known = load_experiment(name).claims.values()
        columns = ("claim", "about", "method", "metric", "published")
        lines = [(one.id, one.of, one.method, one.metric, published_text(one.id)) for one in known]
    listed = [dict(zip(columns, line, strict=True)) for line in lines]
    answer("reproduce", {"name": name, "claims": listed})
    if not lines:
        say(f"{name} answers no claim: the paper has no numbers for it")
        return
    table = _folding_table(*columns, box=None)
    for line in lines:
        table.add_row(*map(escape, line))
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

    found = {"title": result.title, "path": str(result.path), "provenance": dict(result.provenance)}
    answer("reproduce", found | {"rows": [row.as_json() for row in result.rows]})
    measured = [row for row in result.rows if row.verdict != "not run"]
    notes: list[str] = []
    if matrices := random_weights_tables(measured):
        _print_matrices(result.title, matrices)
    else:
        _print_claimed(result.title, measured)
        notes = [f"{row.label}: {row.note}" for row in measured if row.note]
    for line in (*summary.groups_remark(result.groups), *notes):
        say(f"  {line}")
    if skipped := len(result.rows) - len(measured):
        why = result.path.with_suffix(".csv")
        note(f"{skipped} claims not run; {why} says of each why, or with which options it runs")


def _print_claimed(title: str, rows: Sequence["Row"]) -> None:
    """A line per row: the published number, the measured ones and the verdict."""
    from equicam_paper.tables import interval

    table = _folding_table("row", "published", "by their protocol", "by ours", "verdict", title=title)
    for row in rows:
        values = map(interval, (row.as_published, row.clean))
        colour = COLOURS.get(row.verdict, "none")
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
    out: Annotated[Path, _option("Folder for weights, model card and checkpoint; resumed if it exists.")],
    arch: Annotated[str, _option("Name from `equicam models`, or FILE.py:FACTORY.")] = "resnet50",
    weights: Annotated[str | None, _option("Weights file to start from.", PUBLISHED)] = None,
    train: Annotated[str | None, _option("Split to train on.")] = "train",
    test: Annotated[str | None, _option("Split to measure accuracy on.")] = "test",
    epochs: Annotated[int, _option("Largest number of epochs.", min=1)] = 10,
    batch: Annotated[int, _option("Images per step.", min=1)] = 32,
    rate: Annotated[float, _option("Highest learning rate.")] = 1e-4,
    patience: Annotated[int, _option("Epochs without improvement before training stops.", min=1)] = 3,
    seed: Annotated[int, _option("Seed of every random choice.")] = 0,
    rotation_augment: Annotated[bool, _option("Rotate training images by random angles.")] = False,
    workers: Annotated[int, _option("Processes that decode images.", min=0)] = 2,
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
    right = f"accuracy {measured.accuracy:.3f}, balanced {measured.balanced:.3f}"
    say(f"{right} on {measured.images} test images")
    say(f"weights and card: {path}")


app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
for command in (reproduce, finetune):
    app.command()(with_output_options(command, answers=True))


@app.callback()
def main() -> None:
    """The experiments of the paper behind equicam, and the fine-tuning that they need."""
