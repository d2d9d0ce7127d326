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
    resolve_engine,
    say,
    split_commas,
)

if TYPE_CHECKING:
    from equicam.auditing.triage import Triage

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
        import equicam
        from equicam.engines.worker import ModelFromName
        from equicam.models.names import absolute_model, absolute_weights

        named = None if classes is None else tuple(split_commas(classes) or ())
        recipe = ModelFromName(absolute_model(model), absolute_weights(weights), named, layer, compile_)
        device, chosen = resolve_engine(engine, address, actors, device, recipe)
        ready = recipe(device)
        with audit_progress() as progress:
            run = equicam.audit(
                source, ready, out, method=method, views=parse_views(views), split=split, n=n, calibrate=calibrate, fill=fill,
                as_published=as_published, tau=tau, gamma=gamma, dtype=parse_dtype(dtype), compiled=compile_, seed=seed,
                shard_size=shard_size,
                workers=workers or max(1, min(8, (os.cpu_count() or 2) - 1)),
                weights_from=absolute_weights(weights), engine=chosen, progress=progress,
            )  # fmt: skip
        status = run.items["status"].to_pylist()
    bad = status.count("bad")
    say(f"{len(status) - bad:,} images explained, {bad:,} could not be; layer {ready.layer}; run {out}")
    if len(run.manifest.angles) > 1:
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
        found = open_run(run)
        with count_progress("signal or noise", evidence) as tick:
            ranked = found.triage(
                int(budget) if budget.lstrip("-").isdigit() else budget, by, control=control, alpha=alpha, unstable=unstable,
                quotas=quotas, evidence=evidence, seed=seed, source=source, weights=weights, device=device, tick=tick,
            )  # fmt: skip
    if missing := len(found.store.pending()):
        done, total = ranked.ok + ranked.bad, found.manifest.images
        say(
            f"the run is not finished: {done:,} of {total:,} images so far ({missing} shards to go); these come first by name, not at random"
        )
    print_queue(ranked, ranked.queue())
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
        path = open_run(run, source).report(top)
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
    with exit_on_error(), count_progress("computing again", sample) as tick:
        found = open_run(run).verify(
            sample, seed=seed, noted_hash=noted, source=source, weights=weights, device=device, tick=tick
        )
    for problem in found.problems:
        console.print(f"[red]differs[/red] {escape(plain(problem))}", soft_wrap=True)
    again = found.recomputed
    checked = f"{found.files} files, {found.events} events and {again} images computed again"
    checked += _within(dict(found.worst)) if again else ""
    say(f"{checked}: {f'{len(found.problems)} differences' if found.problems else 'all as it says'}")
    if found.problems:
        raise typer.Exit(1)


def _within(worst: dict[str, float]) -> str:
    from equicam.auditing.verify import TOLERANCES

    parts = [f"{key} within {worst[key]:.1e} of ±{TOLERANCES[key]:g}" for key in ("confidence", "peum_score", "eq")]
    return f" ({', '.join(parts)}, maps at least {worst['map']:.5f} alike)"


def print_queue(found: "Triage", queue: list[dict[str, Any]]) -> None:
    """Print the head of the queue with its reasons, and how well the ranking finds unstable maps."""
    if not queue:
        console.print("nothing to rank: no image was explained")
        return
    from equicam.auditing.signals import COLUMNS
    from equicam.reasons import SIGNALS, describe, from_rows

    named = SIGNALS[found.by]
    table = Table("rank", Column("image", overflow="fold"), "class", "p", named, box=SIMPLE_HEAD)
    reasons = Table.grid(Column(justify="right"), Column(overflow="fold"), padding=(0, 2))
    wide = console.width >= REASONS_COLUMN_WIDTH
    if wide:
        table.add_column("why", overflow="fold")
    for row in queue[:10]:
        codes = from_rows(row["reasons"])
        told = [describe(reason) for reason in codes if reason.code != "signal-percentile"]
        score = "–" if len(told) == len(codes) else f"{row[COLUMNS[found.by]]:.4f}"
        name, label, why = (escape(plain(v)) for v in (row["id"], row["class"], "; ".join(told)))
        table.add_row(str(row["rank"]), name, label, f"{row['confidence']:.2f}", score, *([why] if wide else []))
        reasons.add_row(str(row["rank"]), why)
    controls = found.budget - len(queue)
    table.caption = f"{min(10, len(queue))} of {len(queue)} in the queue, by {named}; with {controls} random controls mixed in, in queue.csv"
    console.print(table)
    if not wide:
        console.print("why, by rank:", reasons)
    told = [found.guarantee.sentence]
    if found.quality:
        told += [found.quality.sentence, f"PEUM or disagreement: {found.quality.advice}"]
    for sentence in told:
        console.print(escape(sentence), soft_wrap=True, highlight=False)
    if not found.quality:
        console.print(
            "No calibration subset: how well the queue finds unstable maps here is not known. equicam audit --calibrate N measures it.",
            soft_wrap=True,
        )
