"""The commands of an audit: run, rank, report, verify. Heavy libraries load inside the commands that need them."""

import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equicam.cli.shared import (
    COMPILE,
    console,
    dtype_named,
    listed,
    opened,
    plain,
    refused,
    views_named,
    where,
)

if TYPE_CHECKING:
    from equicam.auditing.store import Run
    from equicam.auditing.triage import Triage
    from equicam.data.items import Item
    from equicam.engines.devices import Devices
    from equicam.engines.ray import Cluster
    from equicam.engines.worker import Recipe
    from equicam.readers.model import Model

RUN = Annotated[
    Path, typer.Argument(metavar="RUN", help="a folder `equicam audit` wrote", show_default=False)
]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is if left out")]
DEVICES = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, or several: cuda:0,cuda:1; the best there is if left out"),
]
ENGINE = Annotated[str, typer.Option(help="local, or ray: many machines; needs equicam\\[ray]")]
ADDRESS = Annotated[
    str | None,
    typer.Option(
        help="of a Ray cluster: auto, or host:port; one is started here if left out", show_default=False
    ),
]
ACTORS = Annotated[
    int | None, typer.Option(min=1, help="of Ray, each with the model; one a GPU, or a CPU, if left out")
]
WEIGHTS = Annotated[
    str | None, typer.Option(help="where the model's weights are now, if they were moved", show_default=False)
]
SOURCE = Annotated[
    str | None, typer.Option(help="where the pictures are now, if they were moved", show_default=False)
]
WIDE = 110
"""Columns of a terminal from which reasons have a column of their own."""


def audit(
    source: Annotated[
        str, typer.Argument(help="a folder, manifest, glob pattern or benchmark", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="the run's folder; one that is there is resumed")],
    model: Annotated[
        str, typer.Option(help="a name `equicam models` lists, or file.py:factory")
    ] = "embedded",
    weights: Annotated[
        str | None, typer.Option(help="a weights file, the name of published weights, or random")
    ] = None,
    method: Annotated[str, typer.Option(help="a name `equicam methods` lists")] = "equigrad-cam",
    views: Annotated[str | None, typer.Option(help="how many views; the method's own 18 if left out")] = None,
    calibrate: Annotated[
        int, typer.Option(help="measure Eq on this many random pictures, so that the queue's value is known")
    ] = 0,
    split: Annotated[str | None, typer.Option(help="of the source: train, test, …")] = None,
    n: Annotated[int | None, typer.Option("--n", help="a class-spread sample of this many pictures")] = None,
    layer: Annotated[str | None, typer.Option(help="the target layer; chosen if left out")] = None,
    classes: Annotated[str | None, typer.Option(help="class names of a zero-shot model, with commas")] = None,
    fill: Annotated[str | None, typer.Option(help="reflect, zeros or coverage")] = None,
    tau: Annotated[float | None, typer.Option(help="of +pcf methods")] = None,
    gamma: Annotated[float | None, typer.Option(help="of +soft methods")] = None,
    as_published: Annotated[bool, typer.Option(help="the paper authors' grid, fill and variants")] = False,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float16: run the network in it")] = None,
    compile_: COMPILE = False,
    seed: Annotated[int, typer.Option(help="of everything random in the run")] = 0,
    part: Annotated[int, typer.Option(min=1, help="pictures in a part, the unit of resuming")] = 32,
    workers: Annotated[int | None, typer.Option(min=1, help="processes that open pictures")] = None,
    device: DEVICES = None,
    engine: ENGINE = "local",
    address: ADDRESS = None,
    actors: ACTORS = None,
) -> None:
    """Explain every picture of a source into a run that can be resumed, ranked, reported and verified.

    Given again, the same command goes on where it was cut off. Pictures that cannot be opened are rows with a reason.
    Ctrl-C finishes the part at work.

    For example: `equicam audit slides/ --model resnet50 --weights mine.safetensors --calibrate 200 --out run`
    """
    from equicam.auditing.audit import audit as run_audit
    from equicam.engines.worker import Recipe

    with refused():
        recipe = Recipe(
            absolute(model),
            absolute(weights),
            None if classes is None else tuple(listed(classes) or ()),
            layer,
            compile_,
        )
        on, chosen = engine_named(engine, address, actors, device, recipe)
        ready = recipe(on)
        try:
            with _progress() as progress:
                run = run_audit(
                    ready, source, out, method=method, views=views_named(views), split=split, n=n, calibrate=calibrate,
                    fill=fill,  # type: ignore[arg-type]
                    as_published=as_published, tau=tau, gamma=gamma, dtype=dtype_named(dtype), seed=seed, part=part,
                    workers=workers or max(1, min(8, (os.cpu_count() or 2) - 1)),
                    weights_from=absolute(weights), engine=chosen, progress=progress,
                )  # fmt: skip
        except KeyboardInterrupt:
            console.print(
                f"stopped; the same command goes on where this one ended ({escape(plain(out))})",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
        items = run.items()
    status = items["status"].to_pylist()
    bad = status.count("bad")
    console.print(
        f"{len(status) - bad:,} pictures explained, {bad:,} could not be; layer {escape(ready.layer)}; run {escape(plain(out))}",
        soft_wrap=True,
    )
    several = len(run.spec.angles) > 1
    triage_it = f"next: equicam triage {escape(plain(shlex.quote(str(out))))} --budget 10%"
    alone = "one view has nothing to disagree with, and cannot be ranked: --views 6 or more can"
    console.print(triage_it if several else alone, soft_wrap=True, highlight=False)


def triage(
    run: RUN,
    by: Annotated[
        str,
        typer.Option(help="what ranks: peum, or disagreement of the views; what it prints says which tells"),
    ] = "peum",
    budget: Annotated[str, typer.Option(help="how many can be reviewed: 10% or a number")] = "10%",
    control: Annotated[float, typer.Option(help="share of the budget for blind random controls")] = 0.20,
    alpha: Annotated[float, typer.Option(help="share of unstable maps the guarantee may miss")] = 0.10,
    unstable: Annotated[float, typer.Option(help="a map is unstable below this Eq")] = 0.5,
    quotas: Annotated[bool, typer.Option(help="deal the queue's places to classes by their size")] = True,
    evidence: Annotated[
        int, typer.Option(min=0, help="signal-or-noise evidence for this many at the head")
    ] = 40,
    seed: Annotated[int, typer.Option(help="of the control arm")] = 0,
    source: SOURCE = None,
    weights: WEIGHTS = None,
    device: DEVICE = None,
) -> None:
    """Rank a run for review: the queue, a blind random control arm, and what the queue is worth on this data.

    Writes `triage.parquet` (everything), `queue.csv` and `fiftyone/` (for reviewers, blind) into the run, and
    `evidence.json` for the head of the queue.

    For example: `equicam triage run --budget 5% --by disagreement`
    """
    with refused():
        options = {
            "by": by,
            "budget": int(budget) if budget.lstrip("-").isdigit() else budget,
            "control": control,
            "alpha": alpha,
            "unstable": unstable,
            "quotas": quotas,
            "seed": seed,
        }
        _triage(opened(run), options, evidence, source, weights, device)
    console.print(
        f"next: equicam review {escape(plain(shlex.quote(str(run))))}", soft_wrap=True, highlight=False
    )


def report(
    run: RUN,
    top: Annotated[int, typer.Option(min=1, help="at most so many pictures of the queue")] = 40,
    source: SOURCE = None,
) -> None:
    """One self-contained HTML file of evidence, and the same numbers as JSON.

    For example: `equicam report run`
    """
    with refused():
        path = _report(opened(run, source), top)
    console.print(f"report: {escape(plain(path))}", soft_wrap=True, highlight=False)


def verify(
    run: RUN,
    sample: Annotated[int, typer.Option(min=0, help="pictures to explain again")] = 20,
    seed: Annotated[int, typer.Option(help="of which ones")] = 0,
    noted: Annotated[
        str | None,
        typer.Option(
            "--hash", help="an event's hash noted elsewhere, as a report prints it", show_default=False
        ),
    ] = None,
    source: SOURCE = None,
    weights: WEIGHTS = None,
    device: DEVICE = None,
) -> None:
    """Check a run: every file against its digest, the log's chain, and a random sample computed again.

    Exits with 1 if anything differs, naming it. For example: `equicam verify run --sample 50`
    """
    from equicam.auditing.log import Log
    from equicam.auditing.verify import check_files, check_log, recompute, refuse_unloadable

    with refused():
        found = opened(run)
        files, problems = check_files(found)
        events, chain = check_log(found, noted)
        problems += chain
        again, worst = 0, dict[str, float]()
        if sample:
            refuse_unloadable(found)
            model, plans, items = _reloaded(found, source, weights, device)
            with _counting("computing again", sample) as tick:
                again, more, worst = recompute(found, model, plans, items, count=sample, seed=seed, tick=tick)
            problems += more
    for problem in problems:
        console.print(f"[red]differs[/red] {escape(plain(problem))}", soft_wrap=True)
    said = (
        f"{files} files, {events} events and {again} pictures computed again{_within(worst) if again else ''}"
    )
    console.print(
        f"{said}: {f'{len(problems)} differences' if problems else 'all as it says'}", soft_wrap=True
    )
    try:
        Log(found.folder).add("verified", {"problems": len(problems), "recomputed": again})
    except OSError as error:
        console.print(f"the log could not be written: {escape(plain(error))}", soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _within(worst: dict[str, float]) -> str:
    from equicam.auditing.verify import TOLERANCES

    parts = [f"{key} within {worst[key]:.1e} of ±{TOLERANCES[key]:g}" for key in ("prob", "peum", "eq")]
    return f" ({', '.join(parts)}, maps at least {worst['map']:.5f} alike)"


def _ranked(run: "Run", options: dict[str, Any]) -> "Triage":
    from equicam.auditing.triage import triage as ranked

    spec = run.spec
    return ranked(run.items(), angles=spec.angles, classes=spec.classes, **options)


def _triage(
    run: "Run",
    options: dict[str, Any],
    count: int,
    source: str | None,
    weights: str | None,
    device: str | None,
) -> "Triage":
    import json

    from equicam.auditing.exports import write_csv, write_fiftyone, write_parquet
    from equicam.auditing.log import Log
    from equicam.auditing.store import file_digest
    from equicam.shards import write_whole

    found = _ranked(run, options)
    if missing := len(run.pending()):
        console.print(
            f"the run is not finished: {found.ok + found.bad:,} of {run.spec.pictures:,} pictures so far ({missing} parts to go); these come first by name, not at random",
            soft_wrap=True,
        )
    queue = sorted(
        (row for row in found.rows.to_pylist() if row["arm"] == "queue"), key=lambda row: row["rank"]
    )
    _show(found, queue)
    # what may be refused or take long comes before anything is written: files and log belong together
    if count and run.spec.model is not None and queue:
        told = _evidence(run, [row["id"] for row in queue[:count]], source, weights, device)
        write_whole(run.folder / "evidence.json", told)
    write_parquet(found, run.folder / "triage.parquet")
    write_csv(found, run.folder / "queue.csv")
    write_fiftyone(found, run.items(), run.folder / "fiftyone")
    write_whole(
        run.folder / "triage.json", json.dumps({"options": options, **found.as_json()}, indent=1).encode()
    )
    names = ("triage.parquet", "triage.json", "queue.csv", "fiftyone/samples.json", "evidence.json")
    files = {name: file_digest(run.folder / name) for name in names if (run.folder / name).is_file()}
    Log(run.folder).add("triaged", {"options": options, "files": files})
    return found


def _show(found: "Triage", queue: list[dict[str, Any]]) -> None:
    if not queue:
        console.print("nothing to rank: no picture was explained")
        return
    from equicam.auditing.signals import NAMES

    named = NAMES[found.by]
    table = Table("rank", Column("picture", overflow="fold"), "class", "p", named, box=SIMPLE_HEAD)
    reasons = Table.grid(Column(justify="right"), Column(overflow="fold"), padding=(0, 2))
    wide = console.width >= WIDE
    if wide:
        table.add_column("why", overflow="fold")
    for row in queue[:10]:
        told = [r for r in row["reasons"] if not (r.startswith(f"{named} ") and ":" in r)]
        score = "–" if len(told) == len(row["reasons"]) else f"{row[found.by]:.4f}"
        name, label, why = (escape(plain(v)) for v in (row["id"], row["class"], "; ".join(told)))
        table.add_row(str(row["rank"]), name, label, f"{row['prob']:.2f}", score, *([why] if wide else []))
        reasons.add_row(str(row["rank"]), why)
    controls = found.budget - len(queue)
    table.caption = f"{min(10, len(queue))} of {len(queue)} in the queue, by {named}; with {controls} random controls mixed in, in queue.csv"
    console.print(table)
    if not wide:
        console.print("why, by rank:", reasons)
    told = [found.guarantee.sentence]
    if found.worth:
        told += [found.worth.sentence, f"PEUM or disagreement: {found.worth.advice}"]
    for sentence in told:
        console.print(escape(sentence), soft_wrap=True, highlight=False)
    if not found.worth:
        console.print(
            "Nothing was calibrated: what the queue is worth here is not known. equicam audit --calibrate N measures it.",
            soft_wrap=True,
        )


def _evidence(
    run: "Run", ids: list[str], source: str | None, weights: str | None, device: str | None
) -> bytes:
    """Evidence on these pictures, as JSON."""
    import json

    from equicam.auditing.evidence import evidence

    model, plans, items = _reloaded(run, source, weights, device)
    wanted = set(ids)
    some = [item for item in items if item.id in wanted]
    rows = run.rows(wanted)
    with _counting("signal or noise", len(some)) as tick:
        found = evidence(model, some, rows, seed=run.spec.seed, dtype=plans.dtype, tick=tick)
    if left := len(some) - len(found):
        console.print(f"no evidence on {left} pictures, which are not the ones that were explained")
    return json.dumps({name: one.as_json() for name, one in found.items()}, indent=1).encode()


def _report(run: "Run", top: int) -> Path:
    from equicam.auditing.triage import ROWS
    from equicam.errors import EquicamError
    from equicam.report.page import write_report
    from equicam.shards import read_json, read_table

    if not (run.folder / "triage.json").is_file():
        raise EquicamError(
            f"{plain(run.folder)}", needs="a queue to report", got="none", fix="equicam triage first"
        )
    # ranking is a function of the rows and its options: made again, it must be the queue that was written
    found = _ranked(run, read_json(run.folder / "triage.json")["options"])
    written = read_table(run.folder / "triage.parquet")  # an older one has fewer columns
    if not found.rows.select([n for n in ROWS.names if n in written.column_names]).equals(written):
        raise EquicamError(
            f"{plain(run.folder)}", needs="the queue of the rows there are", got="one made before the run went on",
            fix="equicam triage again",
        )  # fmt: skip
    evidence = run.folder / "evidence.json"
    return write_report(run, found, evidence=read_json(evidence) if evidence.is_file() else {}, top=top)


def engine_named(
    engine: str, address: str | None, actors: int | None, device: str | None, recipe: "Recipe"
) -> "tuple[str, Devices | Cluster | None]":
    """The device this process puts its own model on, and what computes if that is not all there is."""
    from equicam.engines.devices import Devices
    from equicam.errors import EquicamError

    if engine == "ray":
        from equicam.engines.ray import Cluster, best

        return "cpu", Cluster(device or best(address), address, actors, recipe)
    if engine != "local":
        raise EquicamError("engine", needs="local or ray", got=repr(engine), fix="--engine ray")
    if address is not None or actors is not None:
        raise EquicamError(
            "--address and --actors", needs="--engine ray", got="--engine local", fix="--engine ray"
        )
    names = listed(device) or []
    return ("cpu", Devices(tuple(names), recipe)) if len(names) > 1 else (where(device), None)


def absolute(name: str | None) -> Any:
    """A file given by a relative path, so that it is found from anywhere; any other name as it is."""
    if name is None:
        return None
    path, colon, function = name.partition(".py:")
    file = Path(path + ".py" if colon else path)
    return f"{file.absolute()}:{function}" if colon else str(file.absolute()) if file.is_file() else name


def _reloaded(
    run: "Run", source: str | None, weights: str | None, device: str | None
) -> "tuple[Model, Any, list[Item]]":
    """The run's model, method and pictures, checked to be its own."""
    from dataclasses import replace

    import torch

    import equicam
    from equicam.auditing.compute import Plans
    from equicam.data.items import digest
    from equicam.data.sources import find_items
    from equicam.errors import EquicamError
    from equicam.evaluation.spec import Asked, described
    from equicam.methods import find
    from equicam.models.weights import fingerprint

    spec = run.spec
    zero_shot = spec.model is not None and spec.model.startswith(("open_clip:", "hf:"))
    model = equicam.load(
        spec.model or "", weights=weights or spec.weights_from, layer=spec.layer, device=where(device),
        classes=spec.classes if zero_shot else None,
    )  # fmt: skip
    if fingerprint(model.module) != spec.weights:
        raise EquicamError(
            f"the run {plain(run.folder)}",
            needs="the weights it was made with",
            got="others",
            fix="restoring them",
        )
    ids = set(run.sample()["id"].to_pylist())
    items = sorted(
        (i for i in find_items(source or spec.source, split=spec.split) if i.id in ids), key=lambda i: i.id
    )
    if digest(items) != spec.data:
        raise EquicamError(
            f"the run {plain(run.folder)}", needs="the pictures it was made of", got=f"others in {source or spec.source}",
            fix="--source with where they are",
        )  # fmt: skip
    dtype = getattr(torch, spec.dtype)
    model = replace(model, compiled=spec.compiled)
    method = find(
        spec.method,
        views=equicam.Views(spec.angles),
        as_published=spec.as_published,
        tau=spec.tau,
        gamma=spec.gamma,
    )
    if described(Asked(spec.method, method)) != spec.method_is:
        raise EquicamError(
            f"the run {plain(run.folder)}", needs=f"the method it was made with ({spec.method_is})", got="another of that name",
            fix="the equicam that wrote it",
        )  # fmt: skip
    sample = run.sample()
    calibrated = frozenset(sample.filter(sample["calibrated"])["id"].to_pylist())
    plans = Plans(model, method, spec.fill, None if dtype == model.dtype else dtype, calibrated)  # type: ignore[arg-type]
    return model, plans, items


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """A bar with pictures a second and the time left; without a terminal, a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    start = said = time.monotonic()
    if not console.is_terminal:

        def line(done: int, total: int, now: int) -> None:
            nonlocal said
            if time.monotonic() - said >= 10 or done == total:
                said = time.monotonic()
                rate = now / max(1e-9, said - start)
                console.print(
                    f"{done:,} of {total:,} pictures, {rate:.1f}/s, {(total - done) / rate:,.0f} s left"
                )

        yield line
        return
    columns = (
        TextColumn("auditing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("auditing", total=None, rate="")

        def update(done: int, total: int, now: int) -> None:
            rate = now / max(1e-9, time.monotonic() - start)
            bar.update(task, completed=done, total=total, rate=f"{rate:.1f}/s")

        yield update


@contextmanager
def _counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def worst_cases(run: Path, count: int) -> list[dict[str, Any]]:
    """The head of the queue, for the demo's last lines."""
    import pyarrow.parquet as pq

    rows = [row for row in pq.read_table(run / "triage.parquet").to_pylist() if row["arm"] == "queue"]
    return sorted(rows, key=lambda row: row["rank"])[:count]
