"""The command line. Heavy libraries load inside the commands that need them."""

from typing import Annotated

import typer

from equicam.cli.audit import audit
from equicam.cli.demo import demo
from equicam.cli.evaluate import evaluate
from equicam.cli.explain import explain
from equicam.cli.list import doctor, methods, models, scores
from equicam.cli.pages import open, review  # noqa: A004  # the command's name
from equicam.cli.recipe_file import NAMES
from equicam.cli.runs import causal, compare, export, report, triage, verify
from equicam.console import say, with_output_options

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
PANELS = {
    "Explain": (demo, explain, open),
    "Audit": (audit, triage, causal, review, report, export, compare, verify),
    "Measure": (evaluate,),
    "Models and setup": (models, methods, scores, doctor),
}
"""Commands in order of use."""
WITHOUT_ANSWER = {open}
"""Commands without --json."""
for panel, commands in PANELS.items():
    for command in commands:
        whole = with_output_options(command, answers=command not in WITHOUT_ANSWER, in_file=NAMES)
        app.command(rich_help_panel=panel)(whole)


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
