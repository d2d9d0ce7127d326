"""What every command has: where it writes, how it ends, and the values of options as they are typed.

Results go to stdout, as text or one JSON document; notices, progress and errors to stderr.
"""

import errno
import inspect
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from typer.models import OptionInfo

from equicam.errors import EquicamError, ModelError

if TYPE_CHECKING:
    import torch

    from equicam.progress import Progress

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # print ? for letters the terminal cannot encode
console = Console()  # results; silent with --json
notices = Console(stderr=True)  # and progress; silent with --quiet
errors = Console(stderr=True)
FAILED, USAGE, GATE_FAILED, INTERRUPTED = 1, 2, 3, 130  # exit codes
_OPTIONS = {
    "json": "Print the result as one JSON document.",
    "quiet": "Print results only: no notices, no progress.",
    "verbose": "Print what the library logs, and tracebacks.",
}
"""Of every command, with what they do."""
LOG = logging.getLogger(__name__)
FULL_DISK = {errno.EFBIG, errno.ENOSPC, errno.EDQUOT}
ARGUMENT = re.compile(r"""\b(Recipe\()?([a-z_]+)=("[^"]*"|[^\s)]*[^\s,;.)])(?(1)\))""")
"""An argument of the library in the advice of an error: fill="zeros", views=18, Recipe(seed=1)."""


@dataclass
class Output:
    """The options of the command that runs."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    options: Mapping[str, str] = field(default_factory=dict)  # how each argument is typed
    in_file: Collection[str] = ()  # arguments that a recipe file may hold


output = Output()


class _LogLines(logging.Handler):
    """Lines of the library's log among the notices."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; a traceback has several lines."""
        for line in self.format(record).splitlines():
            note(line, style="dim")


def _show_warning(message: Warning | str, *_where: Any, **_options: Any) -> None:
    note(str(message))


def with_output_options(
    command: Callable[..., None], *, answers: bool, in_file: Collection[str] = ()
) -> Callable[..., None]:
    """The command with --quiet and --verbose, and --json if it answers; `in_file` are the names of a recipe file."""
    extra: dict[str, Any] = {
        name: Annotated[bool, typer.Option(f"--{name}", help=does, rich_help_panel="Output")]
        for name, does in _OPTIONS.items()
        if answers or name != "json"
    }
    signature = inspect.signature(command)
    typed = {
        "compiled" if name == "compile_" else name.rstrip("_"): flag
        for name, one in signature.parameters.items()
        if (flag := _flag(name, get_args(one.annotation)))
    }
    in_file = in_file if "recipe" in typed else ()

    @wraps(command)
    def run(**given: Any) -> None:
        flags = {name: given.pop(name, False) for name in _OPTIONS}
        chosen = Output(**flags, options=typed, in_file=in_file)
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
    log, lines = logging.getLogger("equicam"), _LogLines()
    level = log.level
    _set_output(chosen)
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
        _set_output(Output())


def _set_output(chosen: Output) -> None:
    for one in fields(Output):
        setattr(output, one.name, getattr(chosen, one.name))
    console.quiet, notices.quiet = chosen.json, chosen.quiet


def _flag(name: str, annotation: tuple[Any, ...]) -> str | None:
    """How an option is typed; None for an argument."""
    for one in annotation:
        if isinstance(one, OptionInfo):
            return next(iter(one.param_decls or ()), f"--{name.replace('_', '-')}").partition("/")[0]
    return None


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
    _print(console, text, style)


def note(text: str, style: str | None = None) -> None:
    """The same for a notice."""
    _print(notices, text, style)


def complain(text: str, style: str | None = "red") -> None:
    """The same for an error."""
    _print(errors, text, style)


def _print(to: Console, text: str, style: str | None) -> None:
    to.print(plain(text), style=style, soft_wrap=True, highlight=False, markup=False)


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


@contextmanager
def exit_on_error(interrupted: str = "") -> Iterator[None]:
    """End the command with one sentence on stderr and an exit code.

    2 is for what the user can correct on the command line or in a file it names, 1 for a model that raises and a full
    disk, 130 for Ctrl-C.
    """
    try:
        yield
    except (EquicamError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in FULL_DISK
        resume = "; finished work is kept, and the same command resumes it" if full else ""
        traceback = "; --verbose prints the traceback" if error.__cause__ and not output.verbose else ""
        LOG.debug("traceback of the error", exc_info=error)
        in_model = isinstance(error, ModelError)
        complain(f"{as_typed(error)}{resume}{traceback if in_model else ''}")
        raise typer.Exit(FAILED if in_model or full else USAGE) from error
    except KeyboardInterrupt:
        complain(f"stopped{interrupted}", style=None)
        raise typer.Exit(INTERRUPTED) from None


def as_typed(error: Exception) -> str:
    """An error's sentence; its fix names options as they are typed, not as Python spells them."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str | os.PathLike):
        needs, got = "to be a path that can be read and written", error.strerror
        if isinstance(error, FileExistsError):
            needs, got = "to be a folder", "a file"
        error = EquicamError(repr(os.fspath(error.filename)), needs, got, "another path")
    if isinstance(error, EquicamError):
        fix = ARGUMENT.sub(_as_option, error.fix)
        error = EquicamError(error.what, error.needs, error.got, fix)
    return plain(error)


def _as_option(found: re.Match[str]) -> str:
    """An argument as an option of the command, or as a line of its recipe file; as it is where it is neither."""
    name, value = found[2], found[3]
    if "…" in value:  # of advice in Python
        return found[0]
    if option := output.options.get(name):
        value = value.strip('"')
        return f"no {option}" if value in ("None", "False") else f"{option} {value}".removesuffix(" True")
    if name not in output.in_file:
        return found[0]
    if value == "None":
        return f"no {name} in the recipe file"
    if value in ("True", "False"):
        value = value.lower()
    elif re.fullmatch(r"-?[\d.]+(,-?[\d.]+)+", value):
        value = f"[{value.replace(',', ', ')}]"
    elif not re.fullmatch(r'-?[\d.]+|".*"|\[.*', value):
        value = f'"{value}"'
    return f"{name} = {value} in the recipe file"


def parse_dtype(name: str | None) -> "torch.dtype | None":
    """The type to run the network in."""
    import torch

    known = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise EquicamError("dtype", "bfloat16 or float16", repr(name), "--dtype bfloat16")
    return known[name]


def split_commas(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def resolve_device(device: str | None) -> str:
    """The given device; else a GPU, where torch can use one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")
