"""What every command shares: the console, lists and devices by name, and refusals in one sentence."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from equicam.errors import EquicamError

if TYPE_CHECKING:
    import torch

    from equicam.auditing.store import Run

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal that knows no Greek still gets the rest
console = Console()
COMPILE = Annotated[
    bool,
    typer.Option("--compile", help="compile the network first (half a minute on a GPU), then run it faster"),
]


@contextmanager
def refused() -> Iterator[None]:
    """What the caller can put right ends the command with a sentence and 2, not with a traceback."""
    try:
        yield
    except (EquicamError, OSError) as error:
        full = (
            "; what is finished is kept, and the same command goes on"
            if getattr(error, "errno", 0) in (27, 28, 122)
            else ""
        )
        console.print(f"[red]{escape(as_typed(error))}{full}[/red]", soft_wrap=True)
        raise typer.Exit(2) from error


OPTION = re.compile(
    r"\b(views|fill|method|layer|weights|classes|target|tau|gamma|dtype|split|device|alpha|control|unstable|n)=(\"[^\"]*\"|\S+)"
)


def as_typed(error: Exception) -> str:
    """A refusal whose advice names options as one types them here, not as Python does."""
    said, tries, advice = plain(error).rpartition("; try ")
    if not tries:
        return advice
    advice = OPTION.sub(
        lambda o: f"no --{o[1]}" if o[2] == "None" else f"--{o[1]} {o[2].strip(chr(34))}", advice
    )
    return said + tries + advice.replace("compiled=False", "no --compile")


def plain(text: object) -> str:
    """Somebody's file name or message, with nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def views_named(text: str | None) -> "int | Literal['auto'] | None":
    """A number of views, or auto."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not (text.isdecimal() and int(text)):
        raise EquicamError("--views", needs="a number from 1 on, or auto", got=repr(text), fix="--views 18")
    return int(text)


def opened(folder: Path, source: str | None = None) -> "Run":
    """A run that is there, with its pictures where they are now."""
    from equicam.auditing.store import Run

    run = Run(folder)
    spec = run.spec
    if source is None:
        return run
    from equicam.data.items import readable
    from equicam.data.sources import find_items

    items = find_items(source, split=spec.split)
    return Run(folder, moved={item.id: readable(str(item.path.absolute())) for item in items})


def listed(text: str | None) -> list[str] | None:
    """Names with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def where(device: str | None) -> str:
    """The device asked for, or the best there is."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def dtype_named(name: str | None) -> "torch.dtype | None":
    """A type to run the network in."""
    import torch

    known = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise EquicamError("dtype", needs="bfloat16 or float16", got=repr(name), fix="--dtype bfloat16")
    return known[name]
