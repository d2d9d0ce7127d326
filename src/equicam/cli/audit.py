"""The commands of an audit: audit, triage, report, verify."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equicam.cli import options
from equicam.cli.shared import (
    audit_progress,
    console,
    count_progress,
    exit_on_error,
    open_run,
    parse_dtype,
    parse_views,
    plain,
    resolve_device,
    resolve_engine,
    say,
    split_commas,
)

if TYPE_CHECKING:
    from equicam.auditing.store import Run
    from equicam.auditing.triage import Triage
    from equicam.data.items import Item
    from equicam.readers.model import Model

REASONS_COLUMN_WIDTH = 110
"""Terminal columns from which reasons get a column of their own."""


def audit(
    source: options.Source,
    out: Annotated[Path, typer.Option(help="Folder of the run; resumed if it exists.")],
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    method: options.MethodName = "equigrad-cam",
    views: options.FixedViews = None,
    calibrate: Annotated[
        int,
        typer.Option(
            help="Measure Eq on this many random images, to know how well the queue finds unstable maps."
        ),
    ] = 0,
    split: options.Split = None,
    n: options.SampleSize = None,
    layer: options.Layer = None,
    classes: options.Classes = None,
    fill: options.Fill = None,
    tau: options.Tau = None,
    gamma: options.Gamma = None,
    as_published: options.AsPublished = False,
    dtype: options.Dtype = None,
    compile_: options.Compile = False,
    seed: options.Seed = 0,
    shard_size: Annotated[int, typer.Option(min=1, help="Images per shard, the unit of resuming.")] = 32,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that decode images.", show_default="CPUs - 1, at most 8"),
    ] = None,
    device: options.Devices = None,
    engine: options.Engine = "local",
    address: options.Address = None,
    actors: options.Actors = None,
) -> None:
    """Explain every image of a source into a run that can be resumed, ranked, reported and verified.

    Run the same command again to resume. An image that cannot be decoded becomes a row with a reason. Ctrl-C finishes
    the current shard first.

    Example: `equicam audit slides/ --model resnet50 --weights mine.safetensors --calibrate 200 --out run`
    """
    with exit_on_error(interrupted=f"; the same command resumes ({out})"):
        from equicam.auditing.audit import audit as run_audit
        from equicam.engines.worker import Recipe
        from equicam.models.names import absolute_model, absolute_weights

        named = None if classes is None else tuple(split_commas(classes) or ())
        recipe = Recipe(absolute_model(model), absolute_weights(weights), named, layer, compile_)
        device, chosen = resolve_engine(engine, address, actors, device, recipe)
        ready = recipe(device)
        with audit_progress() as progress:
            run = run_audit(
                ready, source, out, method=method, views=parse_views(views), split=split, n=n, calibrate=calibrate,
                fill=fill,  # type: ignore[arg-type]
                as_published=as_published, tau=tau, gamma=gamma, dtype=parse_dtype(dtype), seed=seed, part=shard_size,
                workers=workers or max(1, min(8, (os.cpu_count() or 2) - 1)),
                weights_from=absolute_weights(weights), engine=chosen, progress=progress,
            )  # fmt: skip
        status = run.items()["status"].to_pylist()
    bad = status.count("bad")
    say(f"{len(status) - bad:,} images explained, {bad:,} could not be; layer {ready.layer}; run {out}")
    if len(run.spec.angles) > 1:
        say(f"next: equicam triage {shlex.quote(str(out))} --budget 10%")
    else:
        say("a run with one view cannot be ranked: its views have nothing to disagree with; try --views 6")


def triage(
    run: options.RunFolder,
    by: Annotated[str, typer.Option(help="Signal to rank by: peum or disagreement.")] = "peum",
    budget: Annotated[str, typer.Option(help="Images that can be reviewed: 10% or a number.")] = "10%",
    control: Annotated[float, typer.Option(help="Share of the budget for the random control arm.")] = 0.20,
    alpha: Annotated[float, typer.Option(help="Share of unstable maps the guarantee may miss.")] = 0.10,
    unstable: Annotated[float, typer.Option(help="Eq below which a map counts as unstable.")] = 0.5,
    quotas: Annotated[bool, typer.Option(help="Give each class places in the queue by its size.")] = True,
    evidence: Annotated[
        int, typer.Option(min=0, help="Images at the head of the queue to test for signal or noise.")
    ] = 40,
    seed: options.Seed = 0,
    source: options.MovedSource = None,
    weights: options.MovedWeights = None,
    device: options.Device = None,
) -> None:
    """Rank a run for review: the queue, a random control arm, and how well the queue finds unstable maps here.

    Writes `triage.parquet` (all images), `queue.csv` and `fiftyone/` (for reviewers, with blinding) into the run, and
    `evidence.json` for the head of the queue.

    Example: `equicam triage run --budget 5% --by disagreement`
    """
    with exit_on_error():
        ranking = {
            "by": by,
            "budget": int(budget) if budget.lstrip("-").isdigit() else budget,
            "control": control,
            "alpha": alpha,
            "unstable": unstable,
            "quotas": quotas,
            "seed": seed,
        }
        _triage(open_run(run), ranking, evidence, source, weights, device)
    say(f"next: equicam review {shlex.quote(str(run))}")


def report(
    run: options.RunFolder,
    top: Annotated[int, typer.Option(min=1, help="Largest number of images from the queue.")] = 40,
    source: options.MovedSource = None,
) -> None:
    """Write one self-contained HTML file of evidence, and the same numbers as JSON.

    Example: `equicam report run`
    """
    with exit_on_error():
        path = _report(open_run(run, source), top)
    say(f"report: {path}")


def verify(
    run: options.RunFolder,
    sample: Annotated[int, typer.Option(min=0, help="Number of random images to explain again.")] = 20,
    seed: options.Seed = 0,
    noted: Annotated[
        str | None,
        typer.Option(
            "--hash", help="Hash of an event, noted elsewhere as the report prints it.", show_default=False
        ),
    ] = None,
    source: options.MovedSource = None,
    weights: options.MovedWeights = None,
    device: options.Device = None,
) -> None:
    """Check a run: every file against its digest, the log's hash chain, and a random sample explained again.

    Exits with 1 and names the differences, if there are any.

    Example: `equicam verify run --sample 50`
    """
    from equicam.auditing.log import Log
    from equicam.auditing.verify import check_files, check_log, recompute, refuse_unloadable

    with exit_on_error():
        found = open_run(run)
        files, problems = check_files(found)
        events, chain = check_log(found, noted)
        problems += chain
        again, worst = 0, dict[str, float]()
        if sample:
            refuse_unloadable(found)
            model, plans, items = _reloaded(found, source, weights, device)
            with count_progress("computing again", sample) as tick:
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
    print_queue(found, queue)
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


def print_queue(found: "Triage", queue: list[dict[str, Any]]) -> None:
    """Print the head of the queue with its reasons, and how well the ranking finds unstable maps."""
    if not queue:
        console.print("nothing to rank: no picture was explained")
        return
    from equicam.auditing.signals import NAMES

    named = NAMES[found.by]
    table = Table("rank", Column("picture", overflow="fold"), "class", "p", named, box=SIMPLE_HEAD)
    reasons = Table.grid(Column(justify="right"), Column(overflow="fold"), padding=(0, 2))
    wide = console.width >= REASONS_COLUMN_WIDTH
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
    with count_progress("signal or noise", len(some)) as tick:
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


def _reloaded(
    run: "Run", source: str | None, weights: str | None, device: str | None
) -> "tuple[Model, Any, list[Item]]":
    """The run's model, method and pictures, checked to be its own."""
    from dataclasses import replace

    import torch

    import equicam
    from equicam.auditing.compute import Plans
    from equicam.data.items import digest_items
    from equicam.data.sources import find_items
    from equicam.errors import EquicamError
    from equicam.evaluation.spec import MapSpec, describe
    from equicam.methods import find
    from equicam.models.weights import fingerprint

    spec = run.spec
    zero_shot = spec.model is not None and spec.model.startswith(("open_clip:", "hf:"))
    model = equicam.load(
        spec.model or "", weights=weights or spec.weights_from, layer=spec.layer, device=resolve_device(device),
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
    if digest_items(items) != spec.data:
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
    if describe(MapSpec(spec.method, method)) != spec.method_is:
        raise EquicamError(
            f"the run {plain(run.folder)}", needs=f"the method it was made with ({spec.method_is})", got="another of that name",
            fix="the equicam that wrote it",
        )  # fmt: skip
    sample = run.sample()
    calibrated = frozenset(sample.filter(sample["calibrated"])["id"].to_pylist())
    plans = Plans(model, method, spec.fill, None if dtype == model.dtype else dtype, calibrated)  # type: ignore[arg-type]
    return model, plans, items


def worst_cases(run: Path, count: int) -> list[dict[str, Any]]:
    """The head of the queue, for the demo's last lines."""
    import pyarrow.parquet as pq

    rows = [row for row in pq.read_table(run / "triage.parquet").to_pylist() if row["arm"] == "queue"]
    return sorted(rows, key=lambda row: row["rank"])[:count]
