"""The commands of an audit: audit, triage, report, verify."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from equicam.cli import options
from equicam.cli.audit_output import (
    LAST_HASH,
    audit_document,
    causal_command,
    print_audit,
    print_triage,
    print_verification,
    triage_document,
    verification_document,
)
from equicam.cli.gates import failed_gate, parse_gates, refuse_unreachable
from equicam.cli.recipe_file import Settings
from equicam.cli.shared import count_progress, load_on_engine
from equicam.console import (
    FAILED,
    GATE_FAILED,
    answer,
    complain,
    exit_on_error,
    note,
    say,
    show_progress,
)

_GATES = "Gates"
_MAX_BAD = "Exit with 3 if more images than this could not be explained: 5% or a number."
_MIN_STEADY = "Exit with 3 if fewer maps than this are steady: 80% or a number."


def audit(
    source: options.Source,
    out: Annotated[Path, Option(help="Folder of the run; resumed if it exists.")],
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    layer: options.Layer = None,
    method: options.MethodName = None,
    views: options.Views = None,
    target: options.Target = None,
    n: options.SampleSize = None,
    device: options.Devices = None,
    recipe: options.RecipeFile = None,
    save_recipe: options.SaveRecipe = None,
    tile: options.Tile = None,
    mpp: options.Mpp = None,
    mpp_is: options.MppIs = None,
    stride: options.Stride = None,
    bands: options.Bands = None,
    max_bad: Annotated[
        str | None, Option(metavar="SHARE", help=_MAX_BAD, show_default=False, rich_help_panel=_GATES)
    ] = None,
    min_steady: Annotated[
        str | None, Option(metavar="SHARE", help=_MIN_STEADY, show_default=False, rich_help_panel=_GATES)
    ] = None,
) -> None:
    """Explain every image of a source into a run that can be resumed, ranked, reported and verified.

    With --tile the source is one or more slides or georeferenced rasters, and each of their windows is an image.

    Run the same command again to resume. An image that cannot be decoded becomes a row with a reason. Ctrl-C finishes
    the current shard first. Exits with 1 if no image could be explained, and with 3 if a gate failed.

    Example: `equicam audit slides/ --model resnet50 --weights mine.safetensors --tile 224 --mpp 0.5 --out run`
    """
    with (
        exit_on_error(interrupted=f"; the same command resumes ({out})"),
        show_progress("listing", unit="files") as progress,
    ):
        import equicam
        from equicam.images.sources import list_source
        from equicam.readers.names import absolute_weights

        gates = parse_gates(max_bad, min_steady)
        settings = Settings.of(
            recipe, recipe={"method": method, "views": views}, model={"layer": layer},
            tiling={"tile": tile, "mpp": mpp, "mpp_is": mpp_is, "stride": stride, "bands": bands},
        )  # fmt: skip
        tiling, window, of_run = settings.tiling, settings.voi, settings.sections["run"]
        settings.save(save_recipe)
        # before the model, which takes long
        listed = list_source(source, split=of_run.get("split"), frames=tiling is None, tick=progress.advance)
        if tiling is None:
            refuse_unreachable(gates, len(listed) if n is None else min(n, len(listed)))
        loaded, engine = load_on_engine(settings, model, weights, device, tiled=True)
        run = equicam.audit(
            source, loaded, out, recipe=settings.recipe, target=target, tiling=tiling, n=n, voi=window, listed=listed,
            **{name: of_run[name] for name in ("split", "calibrate", "shard_size", "workers") if name in of_run},
            weights_from=absolute_weights(weights), engine=engine,
            progress=partial(progress.update, title="auditing", unit="images"),
            listing=partial(progress.update, title="listing", unit="rasters"), notice=note,
        )  # fmt: skip
        refuse_unreachable(gates, run.manifest.images)
        document = audit_document(run, gates)
    answer("audit", document)
    print_audit(document)
    if not document["explained"]:
        complain(f"no image could be explained, of {document['images']:,}")
        raise typer.Exit(FAILED)
    if sentence := failed_gate(document["gates"]):
        complain(sentence)
        raise typer.Exit(GATE_FAILED)
    if len(run.manifest.transforms) > 1:
        note(f"next: equicam triage {shlex.join([str(out), '--budget', '10%'])}")
    else:
        note("a run with one view cannot be ranked: it has no other view to disagree with; try --views 6")


def triage(
    run: options.RunFolder,
    by: Annotated[
        str,
        Option(help="Signal to rank by: stability, peum (uncertainty) or risk."),
    ] = "stability",
    budget: Annotated[str, Option(help="Images that can be reviewed: 10% or a number.")] = "10%",
    control: Annotated[float, Option(help="Share of the budget for the random control arm.")] = 0.20,
    unstable: Annotated[
        float,
        Option(
            help="Stability, or Eq (equivariance), below which the statistics count a map as low; steady and unsteady do not depend on it."
        ),
    ] = 0.5,
    quotas: Annotated[
        bool, Option(help="Divide the queue among the classes in proportion to their images.")
    ] = True,
    seed: options.Seed = 0,
    more: Annotated[
        int | None,
        Option(
            min=1,
            help="Add this many reviews to the existing queue; goes with no other option.",
            show_default=False,
        ),
    ] = None,
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
        first = causal_command(opened)
        trusted = ", if you trust the code of that model" if first and " --model " in first else ""
        note(
            f"next: equicam review {shlex.quote(str(run))}"
            + (f", or first, to see whether the drift is signal or noise{trusted}: {first}" if first else "")
        )


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
    left = facts["remainder"]
    sentence = left["sentence"] if left else None
    counts = {name: facts["summary"][name] for name in ("images", "done", "ok", "bad", "queue")}
    files = {"run": str(run), "report": str(path), "json": str(path.with_suffix(".json"))}
    words = facts["steadiness"]["words"]
    answer(
        "report",
        files
        | counts
        | {"unstable": facts["unstable"]["count"], "steadiness": words, "remainder": sentence}
        | {"last_hash": facts["log"]["last_hash"]},
    )
    if sentence:
        say(sentence)
    say(f"report: {path}")
    say(LAST_HASH.format(facts["log"]["last_hash"]))


def verify(
    run: options.RunFolder,
    sample: Annotated[int, Option(min=0, help="Number of random images to explain again.")] = 20,
    seed: Annotated[int | None, Option(help="Seed of the sample.", show_default="another each time")] = None,
    noted_hash: Annotated[
        str | None,
        Option(
            "--hash",
            help="Last hash of the log, kept elsewhere since an earlier verify or report: its event must still be there.",
            show_default=False,
        ),
    ] = None,
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
        with count_progress("recomputing", min(sample, opened.manifest.images)) as tick:
            found = opened.verify(
                sample, seed=seed, noted_hash=noted_hash, model=model, source=source, weights=weights, device=device,
                tick=tick,
            )  # fmt: skip
    answer("verify", {"run": str(run)} | verification_document(found))
    print_verification(found)
    if not found.ok:
        raise typer.Exit(FAILED)
