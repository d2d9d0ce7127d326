"""The command that regenerates the paper. Heavy libraries load inside it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from equicam.cli import options
from equicam.cli.shared import (
    console,
    exit_on_error,
    parse_dtype,
    plain,
    resolve_device,
    split_commas,
)
from equicam.errors import EquicamError
from equicam.paper import EXPERIMENTS, load_experiment

if TYPE_CHECKING:
    from equicam.paper.context import Context
    from equicam.paper.rows import Row

COLOURS = {
    "matches": "green",
    "differs": "red",
    "artefact": "magenta",
    "undecided": "yellow",
    "measured": "none",
    "not run": "dim",
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
    out: Annotated[
        Path, typer.Option(help="Folder for rows, lines and figures; resumed if it exists.")
    ] = Path("reproduced"),
    device: options.Device = None,
    list_: Annotated[bool, typer.Option("--list", help="List every table, figure and claim.")] = False,
) -> None:
    """Reproduce a table, figure or claim of the paper: published, by the authors' protocol, and by ours.

    Example: `equicam reproduce main --data imagenet/val --n 1000`
    """
    if list_ or name is None:
        _listing()
        return
    with exit_on_error():
        if name not in EXPERIMENTS:
            raise EquicamError(
                "an experiment",
                needs=f"one of {', '.join(EXPERIMENTS)}",
                got=repr(name),
                fix="equicam reproduce --list",
            )
        if data is None:
            raise EquicamError(
                f"reproduce {name}",
                needs=load_experiment(name).needs,
                got="no --data",
                fix=f"equicam reproduce {name} --data FOLDER",
            )
        import equicam
        from equicam.data.sources import find_items
        from equicam.paper.context import Context

        find_items(data, split=split)  # refuse missing data before a model is loaded
        more = dict(_weights_named(one) for one in extra or ())
        ready = equicam.load(
            model, weights=weights, classes=split_commas(classes), device=resolve_device(device)
        )
        context = Context(
            model=ready, data=data, out=out, backbone=backbone or model, domain=domain,
            n=n, split=split, costly=costly, progress=console.is_terminal, options={"dtype": parse_dtype(dtype), "compiled": compile_},
            extra=more,
        )  # fmt: skip
        _warn_unpublished(context)
        rows = list(load_experiment(name).rows(context))
        from equicam.shards import write_atomic

        out.mkdir(parents=True, exist_ok=True)
        kept = {
            "experiment": name,
            "model": model,
            "backbone": context.backbone,
            "domain": domain,
            "n": n,
            "rows": [row.as_json() for row in rows],
        }
        write_atomic(out / f"{name}.json", json.dumps(kept, indent=1, ensure_ascii=False).encode())
    console.print(_table(name, rows))
    for row in rows:
        if row.note and row.verdict != "not run":
            console.print(
                f"  {escape(plain(row.label))}: {escape(plain(row.note))}", soft_wrap=True, highlight=False
            )
    skipped = [row for row in rows if row.verdict == "not run"]
    if skipped:
        console.print(
            f"{len(skipped)} claims not run; {escape(plain(out / f'{name}.json'))} says what would run each",
            soft_wrap=True,
        )


def _weights_named(given: str) -> tuple[str, Path]:
    """rotated=FILE as a name that an experiment asks for, and a file that is there."""
    from equicam.paper.rotation_augmentation import WEIGHTS
    from equicam.paper.seeds import SEEDS

    names = (*WEIGHTS.values(), *SEEDS)
    name, _, file = given.partition("=")
    if name not in names or not Path(file).is_file():
        raise EquicamError(
            "--extra",
            needs=f"{', '.join(names)} with = and an existing file of weights",
            got=repr(given),
            fix="--extra rotated=models/rotated/weights.safetensors",
        )
    return name, Path(file)


def _warn_unpublished(context: "Context") -> None:
    """Warn about a network or domain without published numbers: the name may be misspelt."""
    from equicam.paper.claims import DOMAINS, NETWORKS

    for what, given, known, option in (
        ("network", context.backbone, NETWORKS, "--backbone"),
        ("domain", context.domain, DOMAINS, "--domain"),
    ):
        if given and given not in known:
            warning = f"{given} is no {what} of the paper's ({', '.join(known)}): their numbers are not held against it; {option} says otherwise"
            console.print(escape(plain(warning)), style="yellow", soft_wrap=True, highlight=False)


def _listing() -> None:
    from equicam.paper.claims import claims

    table = Table("name", "claims", "what", "needs", box=None)
    for name in EXPERIMENTS:
        one = load_experiment(name)
        count = sum(claim.startswith(one.answers) for claim in claims()) if one.answers else 0
        table.add_row(name, str(count or ""), one.title, one.needs)
    console.print(table)


def _table(name: str, rows: "list[Row]") -> Table:
    table = Table(
        "what",
        "published",
        "by their protocol",
        "by ours",
        "verdict",
        box=SIMPLE_HEAD,
        title=load_experiment(name).title,
    )
    from equicam.report.tables import estimate

    for one in rows:
        if one.verdict == "not run":
            continue
        measured = [estimate(e) if e else "" for e in (one.as_published, one.clean)]
        colour = COLOURS[one.verdict]
        table.add_row(
            escape(one.label), escape(one.published), *measured, f"[{colour}]{one.verdict}[/{colour}]"
        )
    return table
