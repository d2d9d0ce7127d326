"""`equicam compare`."""

from pathlib import Path
from typing import Annotated

import typer

from equicam.console import GATE_FAILED, answer, exit_on_error, note, say


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="RUN_A", help="Folder of the run before the change.", show_default=False)
    ],
    second: Annotated[
        Path, typer.Argument(metavar="RUN_B", help="Folder of the run after it.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Page to write, with both maps of the images that changed most.", show_default=False
        ),
    ] = None,
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
        raise typer.Exit(GATE_FAILED)
