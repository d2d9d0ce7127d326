"""The commands of an audit: run, rank, report, verify. Heavy libraries load inside the commands that need them."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from equicam.terminal import console, dtype_named, listed, plain, refused, where

if TYPE_CHECKING:
    from equicam.audit.store import Run
    from equicam.audit.triage import Triage
    from equicam.data.items import Item
    from equicam.models.model import Model

RUN = Annotated[
    Path, typer.Argument(metavar="RUN", help="a folder `equicam audit` wrote", show_default=False)
]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is if left out")]
SOURCE = Annotated[
    str | None, typer.Option(help="where the pictures are now, if they were moved", show_default=False)
]


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
    views: Annotated[int | None, typer.Option(help="how many views; the method's own 18 if left out")] = None,
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
    seed: Annotated[int, typer.Option(help="of everything random in the run")] = 0,
    part: Annotated[int, typer.Option(min=1, help="pictures in a part, the unit of resuming")] = 32,
    workers: Annotated[int | None, typer.Option(min=1, help="processes that open pictures")] = None,
    device: DEVICE = None,
) -> None:
    """Explain every picture of a source into a run that can be resumed, ranked, reported and verified.

    Given again, the same command goes on where it was cut off. Pictures that cannot be opened are rows with a reason.
    Ctrl-C finishes the part at work.

    For example: `equicam audit slides/ --model resnet50 --weights mine.safetensors --calibrate 200 --out run`
    """
    import equicam
    from equicam.audit.run import audit as run_audit

    with refused():
        ready = equicam.load(
            model, weights=weights, classes=listed(classes), layer=layer, device=where(device)
        )
        try:
            with _progress() as progress:
                run = run_audit(
                    ready, source, out, method=method, views=views, split=split, n=n, calibrate=calibrate,
                    fill=fill,  # type: ignore[arg-type]
                    as_published=as_published, tau=tau, gamma=gamma, dtype=dtype_named(dtype), seed=seed, part=part,
                    workers=workers or max(1, min(8, (os.cpu_count() or 2) - 1)),
                    weights_from=weights, progress=progress,
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
    console.print(f"next: equicam triage {escape(plain(out))} --budget 10%", soft_wrap=True, highlight=False)


def triage(
    run: RUN,
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
    device: DEVICE = None,
) -> None:
    """Rank a run for review: the queue, a blind random control arm, and what the queue is worth on this data.

    Writes `triage.parquet` (everything), `queue.csv` and `fiftyone/` (for reviewers, blind) into the run, and
    `evidence.json` for the head of the queue.

    For example: `equicam triage run --budget 5%`
    """
    with refused():
        options = {
            "budget": int(budget) if budget.lstrip("-").isdigit() else budget,
            "control": control,
            "alpha": alpha,
            "unstable": unstable,
            "quotas": quotas,
            "seed": seed,
        }
        _triage(_opened(run), options, evidence, source, device)


def report(
    run: RUN,
    top: Annotated[int, typer.Option(min=1, help="at most so many pictures of the queue")] = 40,
) -> None:
    """One self-contained HTML file of evidence, and the same numbers as JSON.

    For example: `equicam report run`
    """
    with refused():
        path = _report(_opened(run), top)
    console.print(f"report: {escape(plain(path))}", soft_wrap=True, highlight=False)


def verify(
    run: RUN,
    sample: Annotated[int, typer.Option(min=0, help="pictures to explain again")] = 20,
    seed: Annotated[int, typer.Option(help="of which ones")] = 0,
    source: SOURCE = None,
    device: DEVICE = None,
) -> None:
    """Check a run: every file against its digest, the log's chain, and a random sample computed again.

    Exits with 1 if anything differs, naming it. For example: `equicam verify run --sample 50`
    """
    from equicam.audit.verify import TOLERANCES, check_files, check_log

    with refused():
        found = _opened(run)
        files, problems = check_files(found)
        events, chain = check_log(found)
        problems += chain
        again, worst = 0, dict[str, float]()
        if sample:
            from equicam.audit.verify import recompute, refuse_unloadable

            refuse_unloadable(found)
            model, plans, items = _reloaded(found, source, device)
            with _counting("computing again", sample) as tick:
                again, more, worst = recompute(found, model, plans, items, count=sample, seed=seed, tick=tick)
            problems += more
        from equicam.audit.log import Log

        Log(found.folder).add("verified", {"problems": len(problems), "recomputed": again})
    for problem in problems:
        console.print(f"[red]differs[/red] {escape(plain(problem))}", soft_wrap=True)
    said = f"{files} files, {events} events and {again} pictures computed again"
    if again:
        said += f" (probability within {worst['prob']:.1e} of ±{TOLERANCES['prob']}, PEUM within {worst['peum']:.1e} of ±{TOLERANCES['peum']}, maps at least {worst['map']:.5f} alike)"
    console.print(
        f"{said}: {f'{len(problems)} differences' if problems else 'all as it says'}", soft_wrap=True
    )
    if problems:
        raise typer.Exit(1)


def _ranked(run: "Run", options: dict[str, Any]) -> "Triage":
    from equicam.audit.triage import triage as ranked

    spec = run.spec
    return ranked(run.items(), angles=spec.angles, classes=spec.classes, **options)


def _triage(
    run: "Run", options: dict[str, Any], count: int, source: str | None, device: str | None
) -> "Triage":
    import json

    from equicam.audit.exports import write_csv, write_fiftyone, write_parquet
    from equicam.audit.log import Log
    from equicam.parts import write_whole

    found = _ranked(run, options)
    write_parquet(found, run.folder / "triage.parquet")
    write_csv(found, run.folder / "queue.csv")
    write_fiftyone(found, run.items(), run.folder / "fiftyone")
    text = json.dumps({"options": options, **found.as_json()}, indent=1)
    write_whole(run.folder / "triage.json", text.encode())
    Log(run.folder).add("triaged", options)
    queue = [row for row in found.rows.to_pylist() if row["arm"] == "queue"]
    queue.sort(key=lambda row: row["rank"])
    table = Table("rank", "picture", "class", "p", "PEUM", "why")
    table.columns[1].overflow = table.columns[5].overflow = "fold"
    for row in queue[:10]:
        why = "; ".join(row["reasons"])
        table.add_row(
            str(row["rank"]),
            escape(plain(row["id"])),
            escape(plain(row["class"])),
            f"{row['prob']:.2f}",
            f"{row['peum']:.4f}",
            escape(plain(why)),
        )
    if len(queue) > 10:
        table.caption = f"the first 10 of {len(queue)}; all, mixed with controls, in queue.csv"
    console.print(table)
    for sentence in (found.guarantee.sentence, found.worth.sentence if found.worth else ""):
        if sentence:
            console.print(escape(sentence), soft_wrap=True, highlight=False)
    if not found.worth:
        console.print(
            "Nothing was calibrated: what the queue is worth here is not known. equicam audit --calibrate N measures it.",
            soft_wrap=True,
        )
    if count and run.spec.model is not None:
        _evidence(run, [row["id"] for row in queue[:count]], source, device)
    return found


def _evidence(run: "Run", ids: list[str], source: str | None, device: str | None) -> None:
    import json

    from equicam.audit.evidence import evidence
    from equicam.parts import write_whole

    model, plans, items = _reloaded(run, source, device)
    wanted = set(ids)
    some = [item for item in items if item.id in wanted]
    rows = {row["id"]: row for row in run.items().to_pylist() if row["id"] in wanted}
    with _counting("signal or noise", len(some)) as tick:
        found = evidence(model, some, rows, seed=run.spec.seed, dtype=plans.dtype, tick=tick)
    text = json.dumps({name: one.as_json() for name, one in found.items()}, indent=1)
    write_whole(run.folder / "evidence.json", text.encode())


def _report(run: "Run", top: int) -> Path:
    import json

    from equicam.report.page import write_report

    def kept(name: str) -> dict[str, Any]:
        there = run.folder / name
        found: dict[str, Any] = json.loads(there.read_text()) if there.is_file() else {}
        return found

    # ranking is a function of the rows and its options: made again, it is the queue that was written
    found = _ranked(run, kept("triage.json").get("options", {}))
    return write_report(run, found, evidence=kept("evidence.json"), top=top)


def _opened(folder: Path) -> "Run":
    from equicam.audit.store import Run

    run = Run(folder)
    _ = run.spec
    return run


def _reloaded(run: "Run", source: str | None, device: str | None) -> "tuple[Model, Any, list[Item]]":
    """The run's model, method and pictures, checked to be its own."""
    import torch

    import equicam
    from equicam.audit.run import Plans
    from equicam.data.items import digest
    from equicam.data.sources import find_items
    from equicam.errors import EquicamError
    from equicam.methods import find
    from equicam.models.weights import fingerprint

    spec = run.spec
    zero_shot = spec.model is not None and spec.model.startswith(("open_clip:", "hf:"))
    model = equicam.load(
        spec.model or "", weights=spec.weights_from, layer=spec.layer, device=where(device),
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
    method = find(spec.method, views=equicam.Views(spec.angles), as_published=spec.as_published)
    plans = Plans(model, method, spec.fill, None if dtype == model.dtype else dtype, frozenset())  # type: ignore[arg-type]
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
