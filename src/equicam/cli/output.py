"""Where a command writes: results to stdout, as text or one JSON document; notices, progress and errors to stderr."""

import inspect
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from equicam.cli import options

if TYPE_CHECKING:
    from equicam.progress import Progress

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # print ? for letters the terminal cannot encode
console = Console()
"""Results; silent with --json."""
notices = Console(stderr=True)
"""Notices and progress; silent with --quiet."""
errors = Console(stderr=True)

FAILED, USAGE, GATE_FAILED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes."""


@dataclass
class Output:
    """The options of the command that runs."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False


output = Output()


class LogLines(logging.Handler):
    """Lines of the library's log among the notices."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; a traceback has several lines."""
        for line in self.format(record).splitlines():
            note(line, style="dim")


def _show_warning(message: Warning | str, *_where: Any, **_options: Any) -> None:
    note(str(message))


def with_output_options(command: Callable[..., None], *, answers: bool) -> Callable[..., None]:
    """The command with --quiet and --verbose, and --json if it answers."""
    extra: dict[str, Any] = {"json_": options.Json} if answers else {}
    extra |= {"quiet": options.Quiet, "verbose": options.Verbose}
    signature = inspect.signature(command)

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = Output(given.pop("json_", False), given.pop("quiet"), given.pop("verbose"))
        if chosen.quiet and chosen.verbose:
            raise typer.BadParameter("--quiet and --verbose exclude each other")
        with _output(chosen):
            command(**given)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in extra.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = command.__annotations__ | extra
    return run


@contextmanager
def _output(chosen: Output) -> Iterator[None]:
    log, lines = logging.getLogger("equicam"), LogLines()
    level = log.level
    output.json, output.quiet, output.verbose = chosen.json, chosen.quiet, chosen.verbose
    console.quiet, notices.quiet = chosen.json, chosen.quiet
    lines.setFormatter(logging.Formatter("%(name)s: %(message)s" if chosen.verbose else "%(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.DEBUG if chosen.verbose else logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
        output.json = output.quiet = output.verbose = console.quiet = notices.quiet = False


def answer(command: str, document: Mapping[str, Any]) -> None:
    """With --json, print the result as one document; `schemas/` has the schema of each command's."""
    if not output.json:
        return
    from equicam import __version__
    from equicam.shards import json_ready

    whole = {"command": command, "equicam": __version__} | dict(document)
    # letters outside ASCII are escaped: a file name may hold bytes that are no text
    sys.stdout.write(json.dumps(json_ready(whole), indent=1, allow_nan=False) + "\n")


def say(text: str, style: str | None = None) -> None:
    """Print a line of the result; it may hold file names: no markup, no wrapping, no control characters."""
    console.print(plain(text), style=style, soft_wrap=True, highlight=False, markup=False)


def note(text: str, style: str | None = None) -> None:
    """The same for a notice."""
    notices.print(plain(text), style=style, soft_wrap=True, highlight=False, markup=False)


def complain(text: str) -> None:
    """The same for an error."""
    errors.print(plain(text), style="red", soft_wrap=True, highlight=False, markup=False)


def plain(text: object) -> str:
    """A file name or message without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def plural(count: int, noun: str) -> str:
    """A number and its noun: 1 image, 2 images."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@contextmanager
def show_progress(title: str, total: int | None = None, *, unit: str = "images") -> "Iterator[Progress]":
    """A bar on a terminal, a line every ten seconds anywhere else, nothing with --quiet."""
    from equicam.progress import progress_bar

    with progress_bar(title, total, unit=unit, shown=not output.quiet, console=notices) as progress:
        yield progress
