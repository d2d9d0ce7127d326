"""The command that opens the review page. Everything heavy loads inside it, and torch never does."""

import getpass
import socket
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equicam.cli.shared import console, exit_on_error, open_run, plain
from equicam.errors import EquicamError

PORT = 8321
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def review(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="a folder `equicam audit` wrote", show_default=False)
    ],
    reviewer: Annotated[
        str | None, typer.Option(help="who reads; the login name if left out", show_default=False)
    ] = None,
    blind: Annotated[
        bool, typer.Option("--blind/--open", help="hide prediction, label and scores until the first verdict")
    ] = True,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help=f"{PORT}, or a free one, if left out", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="the address to listen at")] = "127.0.0.1",
    expose: Annotated[
        bool, typer.Option("--expose", help="listen beyond this machine; read what it prints")
    ] = False,
    browser: Annotated[bool, typer.Option(help="open the page")] = True,
    source: Annotated[
        str | None, typer.Option(help="where the pictures are now, if they were moved", show_default=False)
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="write all verdicts to this .csv or .json and stop", show_default=False),
    ] = None,
) -> None:
    """Give verdicts on the queue of a run, in the browser, by keyboard.

    For example: `equicam review run --reviewer ana`, or `equicam review run --export verdicts.csv`
    """
    with exit_on_error():
        if export is not None:
            count = _export(run, export)
            console.print(f"{count:,} verdicts: {escape(plain(export))}", soft_wrap=True, highlight=False)
            return
        _serve(run, reviewer, blind, port, host, expose, browser, source)


def _serve(
    run: Path,
    reviewer: str | None,
    blind: bool,
    port: int | None,
    host: str,
    expose: bool,
    browser: bool,
    source: str | None,
) -> None:
    try:
        import uvicorn

        from equicam.review.app import make_app
    except ImportError as error:
        raise EquicamError(
            "equicam review", needs="FastAPI and uvicorn", got=f"no module {error.name}", fix="pip install 'equicam[review]'"
        ) from error  # fmt: skip
    from equicam.auditing.log import Log
    from equicam.auditing.queue_files import refuse_unranked
    from equicam.auditing.review_log import reviewer_name
    from equicam.review.auth import Access

    if host not in LOOPBACK and not expose:
        raise EquicamError(
            f"--host {host}", needs="--expose, for others can then reach the page", got="no --expose",
            fix="leaving --host out and ssh -L from elsewhere",
        )  # fmt: skip
    found = open_run(run, source)
    refuse_unranked(found.store)
    name = reviewer_name(reviewer) if reviewer else None if expose else _login()
    with _listening(host, port) as listening:
        at = listening.getsockname()[1]
        access = Access(
            port=at, hosts=(host, socket.gethostname()) if expose else (), exposed=expose, reviewer=name
        )
        app = make_app(found.store, access, blind=blind)
        Log(found.folder).add("review opened", {"blind": blind, "exposed": expose}, who=name or "equicam")
        shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
        address = f"http://{shown}:{at}/?token={access.token}"
        if expose:
            console.print(
                "[yellow]exposed:[/yellow] whoever reaches this port and has the address below can see the run's pictures and give "
                "verdicts under any name, and the traffic is not encrypted. ssh -L to a page on 127.0.0.1 is safer.",
                soft_wrap=True,
            )
        console.print(f"review: {address}", soft_wrap=True, highlight=False, markup=False)
        console.print("Ctrl-C stops the page; every verdict is kept the moment it is given.", highlight=False)
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
        )
        uvicorn.Server(settings).run(sockets=[listening])


def _listening(host: str, port: int | None) -> socket.socket:
    """A socket at the port asked for; if none was, at ours or a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (port,) if port else (PORT, 0):
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, wanted))
            found.listen(128)
        except OSError as error:
            found.close()
            if wanted == PORT and port is None:
                continue
            raise EquicamError(
                f"port {wanted} of {host}", needs="to be free", got=error.strerror, fix="another --port"
            ) from error
        return found
    raise AssertionError("unreachable")


def _login() -> str | None:
    """The login name, where there is one; else the page asks."""
    from equicam.auditing.review_log import reviewer_name

    try:
        return reviewer_name(getpass.getuser())
    except (EquicamError, OSError, KeyError):
        return None


def _export(run: Path, path: Path) -> int:
    import json
    from dataclasses import asdict

    from equicam.auditing.csv_export import as_csv
    from equicam.auditing.queue_files import read_queue
    from equicam.auditing.review_log import COLUMNS, TRIAGE_COLUMNS, ReviewLog, verdict_rows
    from equicam.shards import json_ready, write_atomic

    found = open_run(run)
    readings = ReviewLog(found.folder)
    readings.refresh()
    rows = verdict_rows(readings, read_queue(found.store))
    if path.suffix.lower() == ".csv":
        write_atomic(path, as_csv((*COLUMNS, *TRIAGE_COLUMNS), rows))
    elif path.suffix.lower() == ".json":
        notes = [asdict(note) for note in readings.notes()]
        told = {"complete": True, "verdicts": rows, "notes": notes}
        write_atomic(path, json.dumps(json_ready(told), indent=1, allow_nan=False).encode())
    else:
        raise EquicamError(
            "--export", needs="a name that ends in .csv or .json", got=plain(path), fix="verdicts.csv"
        )
    return len(rows)
