"""`equicam demo`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equicam.cli import audit as commands
from equicam.cli.shared import console, exit_on_error, open_run, plain, say


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the images and the run.")] = Path("demo"),
    count: Annotated[int, typer.Option(min=10, help="Number of synthetic images.")] = 200,
) -> None:
    """Audit, rank and report synthetic histology-like images with the embedded model, offline.

    Example: `equicam demo --out demo`
    """
    from PIL import Image

    from equicam.data.synthetic import draw_many
    from equicam.reasons import describe, from_rows

    name = "" if count == 200 else f"-{count}"
    images, run = out / f"images{name}", out / f"run{name}"
    with exit_on_error():
        images.mkdir(parents=True, exist_ok=True)
        for i, patch in enumerate(draw_many(count, seed=7)):
            path = images / f"patch-{i:03d}.png"
            if not path.is_file():
                Image.fromarray(patch.image).save(path)
    commands.audit(str(images), run, calibrate=count // 2, device="cpu")
    commands.triage(run, evidence=20, device="cpu")
    commands.verify(run, sample=5, device="cpu")
    worst = open_run(run).queue()[:3]
    console.print(f"\nfirst in the queue, {len(worst)} of them:")
    for row in worst:
        why = "; ".join(describe(reason) for reason in from_rows(row["reasons"]))
        console.print(f"  {escape(plain(row['id']))}: {escape(plain(why))}", soft_wrap=True, highlight=False)
    commands.report(run)
    say("Synthetic images and a synthetic model: use them to look around, not to draw conclusions.")
