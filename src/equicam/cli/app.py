"""The command line. Heavy libraries load inside the commands that need them."""

from typing import Annotated

import typer

from equicam.cli.audit import audit, report, seal, triage, verify
from equicam.cli.demo import demo
from equicam.cli.evaluate import evaluate
from equicam.cli.explain import explain
from equicam.cli.export import export
from equicam.cli.finetune import finetune
from equicam.cli.list import doctor, methods, models, scores
from equicam.cli.open import open_page
from equicam.cli.reproduce import reproduce
from equicam.cli.review import review
from equicam.cli.shared import say

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
for command in (
    demo, explain, audit, triage, review, report, export, verify, seal, evaluate, reproduce, finetune, models, methods, scores, doctor,
):  # fmt: skip
    app.command()(command)
app.command("open")(open_page)


def _print_version(wanted: bool) -> bool:
    if wanted:
        import equicam

        say(f"equicam {equicam.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Rotation-audited saliency: maps that rotate with the image, and a queue of those that do not."""
