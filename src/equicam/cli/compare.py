"""`equicam compare`."""

from pathlib import Path
from typing import Annotated

import typer

from equicam.cli.output import GATE_FAILED, answer, note, say
from equicam.cli.shared import exit_on_error


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run before, a folder.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run after, a folder.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Page to write, with both maps of the images that changed most.", show_default=False
        ),
    ] = None,
) -> None:
    """Did retraining make the maps steadier? Two runs on the same images, paired image by image.

    Exits with 0 if the maps of RUN_B are not less steady than those of RUN_A, and with 3 if they are.

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
    if found.direction == "less steady":
        raise typer.Exit(GATE_FAILED)
