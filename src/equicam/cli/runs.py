"""The commands on a run: triage, causal, report, export, compare, verify."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from equicam.cli import options
from equicam.cli.run_output import (
    LAST_HASH,
    causal_command,
    print_causal,
    print_export,
    print_triage,
    print_verification,
    triage_document,
    verification_document,
)
from equicam.console import FAILED, GATE_FAILED, answer, exit_on_error, note, say, show_progress
from equicam.runs import CAUSAL_IMAGES

_BY = "Signal to rank by: stability, peum (uncertainty) or risk."
_UNSTABLE = "Stability, or Eq (equivariance), below which the statistics count a map as low; steady and unsteady do not depend on it."
_QUOTAS = "Divide the queue among the classes in proportion to their images."
_MORE = "Add this many reviews to the existing queue; goes with no other option."
_HASH = (
    "Last hash of the log, kept elsewhere since an earlier verify or report: its event must still be there."
)
_CLASS = "Only windows explained for this class, by name or number."
_EVERY = "Side of a cell of the stitched map, in pixels at the model's resolution."
_REGIONS = "For QuPath: annotations of the highest share of the stitched map, instead of windows."
_BLIND = "Only windows under review, by place, without class, scores or rank."
_PAGE = "Page to write, with both maps of the images that changed most."


def triage(
    run: options.RunFolder,
    by: Annotated[str, Option(help=_BY)] = "stability",
    budget: Annotated[str, Option(help="Images that can be reviewed: 10% or a number.")] = "10%",
    control: Annotated[float, Option(help="Share of the budget for the random control arm.")] = 0.20,
    unstable: Annotated[float, Option(help=_UNSTABLE)] = 0.5,
    quotas: Annotated[bool, Option(help=_QUOTAS)] = True,
    seed: options.Seed = 0,
    more: Annotated[int | None, Option(min=1, help=_MORE, show_default=False)] = None,
) -> None:
    """Rank a run for review: the queue, a random control arm, and how many maps have a low stability.

    Writes `triage.parquet` (the images under review, with arm and rank) and `queue.csv` (for reviewers, with blinding) into the run.

    Example: `equicam triage run --budget 5% --by risk`, and later `equicam triage run --more 50`
    """
    with exit_on_error():
        import equicam

        opened = equicam.open_run(run)
        ranked = opened.triage(
            budget, by, control=control, unstable=unstable, quotas=quotas, seed=seed, more=more
        )
        answer("triage", triage_document(opened, ranked))
        print_triage(opened, ranked)
    if ranked.queue():
        first, causal_test = causal_command(opened), ""
        if first:
            trusted = ", if you trust the code of that model" if " --model " in first else ""
            causal_test = f", or first, to see whether the drift is signal or noise{trusted}: {first}"
        note(f"next: equicam review {shlex.quote(str(run))}{causal_test}")


def causal(
    run: options.RunFolder,
    n: Annotated[
        int, Option("--n", min=CAUSAL_IMAGES, help="Random images to test; all if the run has fewer.")
    ] = CAUSAL_IMAGES,
    seed: options.Seed = 0,
    model: options.TrustedModel = None,
    source: options.MovedSource = None,
    weights: options.MovedWeights = None,
    device: options.Device = None,
) -> None:
    """Signal or noise: does the network use the pixels where a map drifts? A causal test on random images of a run.

    It answers in one sentence, next to the same test with random weights; --verbose prints the numbers. `causal.json` in
    the run keeps the result, and the report shows it.

    Example: `equicam causal run`
    """
    with exit_on_error():
        import equicam

        opened = equicam.open_run(run)
        with show_progress("signal or noise", min(n, opened.manifest.images)) as progress:
            found = opened.causal(
                n,
                seed=seed,
                model=model,
                source=source,
                weights=weights,
                device=device,
                tick=progress.advance,
            )
    answer("causal", {"run": str(run), "sentence": found.sentence} | found.to_json())
    print_causal(found)
    note(f"next: equicam report {shlex.quote(str(run))}")


def report(
    run: options.RunFolder,
    top: Annotated[int, Option(min=1, help="Show at most this many images of the queue.")] = 40,
    source: options.MovedSource = None,
) -> None:
    """Write one self-contained HTML file of evidence, and the same numbers as JSON.

    Example: `equicam report run`
    """
    with exit_on_error():
        import equicam
        from equicam.shards import read_json

        path = equicam.open_run(run, source).report(top)
        facts = read_json(path.with_suffix(".json"))
    sentence, last_hash = facts["remainder"] and facts["remainder"]["sentence"], facts["log"]["last_hash"]
    files = {"run": str(run), "report": str(path), "json": str(path.with_suffix(".json"))}
    counts = {name: facts["summary"][name] for name in ("images", "done", "ok", "bad", "queue")}
    about = {"unstable": facts["unstable"]["count"], "steadiness": facts["steadiness"]["words"]}
    answer("report", files | counts | about | {"remainder": sentence, "last_hash": last_hash})
    if sentence:
        say(sentence)
    say(f"report: {path}")
    say(LAST_HASH.format(last_hash))


def export(
    run: options.RunFolder,
    to: Annotated[str, Option(help="geotiff, qupath, ome-tiff, geojson or dicom.", show_default=False)],
    class_: Annotated[
        str | None, Option("--class", help=_CLASS, show_default="the run's, if it has one alone")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder to write into.", show_default="RUN/export")] = None,
    every: Annotated[int, Option(min=1, help=_EVERY)] = 8,
    regions: Annotated[float | None, Option(metavar="SHARE", help=_REGIONS, show_default=False)] = None,
    blind: Annotated[bool, Option("--blind", help=_BLIND)] = False,
    compress: Annotated[bool, Option("--gzip", help="Compress GeoJSON; QuPath reads it.")] = False,
    force: Annotated[bool, Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a run of slides, maps or DICOM images for other programs, a file for each.

    geotiff and ome-tiff hold the maps of all windows put together; qupath and geojson (QGIS) hold the windows with
    their measurements; dicom holds the map of each DICOM image. A file that is there, into which verdicts may have been
    drawn, is replaced only with --force.

    Example: `equicam export run --to geotiff --class forest`
    """
    with exit_on_error(), show_progress("exporting", unit="files") as progress:
        import equicam

        found = equicam.open_run(run).export(
            to, class_=class_, out=out, every=every, regions=regions, blind=blind, compress=compress, force=force,
            tick=progress.advance,
        )  # fmt: skip
    files = {"run": str(run), "to": to, "files": [str(path) for path in found.files]}
    counts = ("windows", "left_out", "refused", "pending", "log_error")
    answer("export", files | {name: getattr(found, name) for name in counts})
    print_export(found, to, blind=blind)


def compare(
    first: Annotated[
        Path, Argument(metavar="RUN_A", help="Folder of the run before the change.", show_default=False)
    ],
    second: Annotated[
        Path, Argument(metavar="RUN_B", help="Folder of the run after it.", show_default=False)
    ],
    out: Annotated[Path | None, Option(help=_PAGE, show_default=False)] = None,
) -> None:
    """Did retraining make the maps steadier? Two runs on the same images, paired image by image.

    Exits with 0 if the maps of RUN_B are not less steady than those of RUN_A, and with 3 if they are, or if most
    of them are of other classes and so do not compare.

    Example: `equicam compare before after --out compare.html`
    """
    with exit_on_error():
        import equicam

        found = equicam.compare(first, second)
        page = None if out is None else found.report(out)
    answer("compare", found.to_json() | {"report": None if page is None else str(page)})
    say(found.sentence)
    for line in found.notes:
        note(line)
    if page is not None:
        say(f"report: {page}")
    if found.direction in ("less steady", "does not compare"):
        raise Exit(GATE_FAILED)


def verify(
    run: options.RunFolder,
    sample: Annotated[int, Option(min=0, help="Number of random images to explain again.")] = 20,
    seed: Annotated[int | None, Option(help="Seed of the sample.", show_default="another each time")] = None,
    noted_hash: Annotated[str | None, Option("--hash", help=_HASH, show_default=False)] = None,
    model: options.TrustedModel = None,
    source: options.MovedSource = None,
    weights: options.MovedWeights = None,
    device: options.Device = None,
) -> None:
    """Check a run: every file against its digest, the log's hash chain, the rows, and a random sample explained again.

    Exits with 1 and names the differences, if there are any; then nothing is loaded or explained again. Exits with 1, too,
    if the sample cannot be explained again because a file of the run's must be named (--weights, --model, --source);
    --sample 0 checks the files alone. If nothing differs, the log's last hash is printed: keep it elsewhere, because a log
    whose end was cut off is found by --hash alone.

    Example: `equicam verify run --sample 50`
    """
    with exit_on_error():
        import equicam

        opened = equicam.open_run(run)
        with show_progress("recomputing", min(sample, opened.manifest.images)) as progress:
            found = opened.verify(
                sample, seed=seed, noted_hash=noted_hash, model=model, source=source, weights=weights, device=device,
                tick=progress.advance,
            )  # fmt: skip
    answer("verify", {"run": str(run)} | verification_document(found))
    print_verification(found)
    if not found.ok:
        raise Exit(FAILED)
