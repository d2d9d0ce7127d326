"""`equicam review`. It never imports torch."""

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from equicam.cli import options
from equicam.cli.shared import console, exit_on_error, say
from equicam.errors import EquicamError


def review(
    run: options.RunFolder,
    reviewer: Annotated[
        str | None, typer.Option(help="Name of the reviewer.", show_default="the login name")
    ] = None,
    blinding: Annotated[
        bool,
        typer.Option(help="Hide prediction, label and signals of an image until the first verdict on it."),
    ] = True,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the page.", show_default="8321, or a free one"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    expose: Annotated[
        bool, typer.Option("--expose", help="Let other machines reach the page; read the warning it prints.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    source: options.MovedSource = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write all verdicts to this .csv or .json file and exit.", show_default=False),
    ] = None,
) -> None:
    """Give verdicts on the queue of a run, in the browser, by keyboard.

    Example: `equicam review run --reviewer ana`, or `equicam review run --export verdicts.csv`
    """
    with exit_on_error():
        import equicam

        store = equicam.open_run(run, source).store
        if export is not None:
            from equicam.review.verdict_files import write_verdicts

            say(f"{write_verdicts(store, export):,} verdicts: {export}")
            return
        try:
            from equicam.review.server import serve_review
        except ImportError as error:
            raise EquicamError(
                "equicam review", needs="FastAPI and uvicorn", got=f"no module {error.name}",
                fix="pip install 'equicam[review]'",
            ) from error  # fmt: skip
        serve_review(
            store, reviewer=reviewer, blind=blinding, port=port, host=host, expose=expose,
            announce=lambda address: _announce(address, expose=expose, browser=browser),
        )  # fmt: skip


def _announce(address: str, *, expose: bool, browser: bool) -> None:
    if expose:
        console.print(
            "[yellow]exposed:[/yellow] everyone who can reach this port and has the address below can see the images of the run "
            "and give verdicts under any name, and the traffic is not encrypted. ssh -L to a page on 127.0.0.1 is safer.",
            soft_wrap=True,
        )
    say(f"review: {address}")
    say("Ctrl-C stops the page; every verdict is saved the moment it is given.")
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
