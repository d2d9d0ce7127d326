"""`equicam demo`."""

from pathlib import Path
from typing import Annotated

import typer

from equicam.cli.audit import audit_document, print_audit
from equicam.cli.run_output import print_triage, print_verification
from equicam.console import FAILED, answer, exit_on_error, note, say, show_progress


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the images and the run.")] = Path("demo"),
    count: Annotated[int, typer.Option(min=10, max=200, help="Number of synthetic images.")] = 200,
) -> None:
    """Audit, rank, verify and report synthetic histology-like images with the embedded model, offline.

    Example: `equicam demo --out demo`
    """
    with exit_on_error(interrupted="; the same command resumes"), show_progress("auditing") as progress:
        from equicam.demo import run_demo, worst_tenth_sentence
        from equicam.reasons import describe, from_rows

        run, triage, verified, report = run_demo(out, count, progress=progress.update)
    audited = audit_document(run, ())
    counts = ("run", "images", "explained", "bad", "steady", "unsteady", "cannot_say")
    worst_tenth = worst_tenth_sentence(triage)
    answer(
        "demo",
        {name: audited[name] for name in counts}
        | {"queue": [row["id"] for row in triage.queue()], "worst_tenth": worst_tenth}
        | {"verified": verified.ok, "problems": list(verified.problems), "report": str(report)},
    )
    print_audit(audited)
    print_triage(run, triage)
    print_verification(verified)
    say(worst_tenth)
    worst = triage.queue()[:3]
    say(f"the first {len(worst)} in the queue:" if len(worst) != 1 else "first in the queue:")
    for row in worst:
        say(f"  {row['id']}: {'; '.join(map(describe, from_rows(row['reasons'])))}")
    say(f"report: {report}")
    note("Synthetic images and a synthetic model: use them to look around, not to draw conclusions.")
    if not verified.ok:
        raise typer.Exit(FAILED)
    note(f"next: equicam review {run.folder}")
