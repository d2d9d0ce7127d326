"""Helpers of every command: the console, errors as one sentence, values parsed from text, progress bars."""

import errno
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from equicam.errors import EquicamError

if TYPE_CHECKING:
    import torch

    from equicam.core.views import Views
    from equicam.data.rasters.options import Tiling
    from equicam.engines.devices import Devices
    from equicam.engines.ray import Cluster
    from equicam.engines.worker import ModelFromName
    from equicam.readers.model import Model

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # print ? for letters the terminal cannot encode
console = Console()

FULL_DISK = {errno.EFBIG, errno.ENOSPC, errno.EDQUOT}
TYPED = {
    "views": "--views",
    "fill": "--fill",
    "context": "--context",
    "method": "--method",
    "layer": "--layer",
    "weights": "--weights",
    "classes": "--classes",
    "target": "--target",
    "tau": "--tau",
    "gamma": "--gamma",
    "dtype": "--dtype",
    "compiled": "--compile",
    "as_published": "--as-published",
    "group": "--group",
    "split": "--split",
    "n": "--n",
    "device": "--device",
    "seed": "--seed",
    "calibrate": "--calibrate",
    "by": "--by",
    "control": "--control",
    "unstable": "--unstable",
    "more": "--more",
    "tile": "--tile",
    "stride": "--stride",
    "tissue": "--tissue",
    "bands": "--bands",
    "scale": "--scale",
    "mpp": "--mpp",
    "display": "--display",
    "mean": "--mean",
    "std": "--std",
}
"""How an argument of the library is typed on the command line."""
NAMED_VIEWS = {"dihedral": "dihedral:18", "scales": "scales:0.8,1,1.25", "shifts": "shifts:0.05"}
"""Sets of views that have a name, as they are typed."""
ARGUMENT = re.compile(rf"\b({'|'.join(TYPED)})=(\"[^\"]*\"|\S+)")


@contextmanager
def exit_on_error(interrupted: str = "") -> Iterator[None]:
    """End the command with one sentence and status 2 on an error a user can correct, with 130 on Ctrl-C."""
    try:
        yield
    except (EquicamError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in FULL_DISK
        resume = "; finished work is kept, and the same command resumes it" if full else ""
        console.print(f"[red]{escape(as_typed(error))}{resume}[/red]", soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        console.print(f"stopped{escape(plain(interrupted))}", soft_wrap=True)
        raise typer.Exit(130) from None


def as_typed(error: Exception) -> str:
    """An error's sentence; its fix names options as they are typed, not as Python spells them."""
    if isinstance(error, EquicamError):
        fix = ARGUMENT.sub(lambda found: _as_option(found[1], found[2].strip('"')), error.fix)
        error = EquicamError(error.what, needs=error.needs, got=error.got, fix=fix)
    return plain(error)


def _as_option(argument: str, value: str) -> str:
    option = TYPED[argument]
    return (
        f"no {option}" if value in ("None", "False") else option if value == "True" else f"{option} {value}"
    )


def plain(text: object) -> str:
    """A file name or message without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def say(text: str, style: str | None = None) -> None:
    """Print a line that may hold file names: no markup, no wrapping, no control characters."""
    console.print(plain(text), style=style, soft_wrap=True, highlight=False, markup=False)


def parse_views(text: str | None) -> "int | Literal['auto'] | Views | None":
    """A number of views, auto, or a set of them by name."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if text.isdecimal() and int(text):
        return int(text)
    name, _, values = text.partition(":")
    try:
        return _named_views(name, values)
    except ValueError as error:
        raise EquicamError(
            "--views", needs="a number from 1 on, auto, dihedral: and an even number, scales: and factors above 0, or shifts: and a share below 0.5",
            got=repr(text), fix=f"--views {NAMED_VIEWS.get(name, '18')}",
        ) from error  # fmt: skip


def parse_window(text: str | None) -> tuple[float, float] | None:
    """Centre and width of a window, separated by a comma."""
    if text is None:
        return None
    try:
        centre, width = map(float, text.split(","))
    except ValueError as error:
        raise EquicamError(
            "--voi", needs="CENTER,WIDTH, two numbers", got=repr(text), fix="--voi 40,400"
        ) from error
    return centre, width


def _named_views(name: str, values: str) -> "Views":
    """The set of views of that name; a ValueError for anything else."""
    if name not in NAMED_VIEWS:
        raise ValueError(name)
    from equicam.core.views import Views

    if name == "dihedral":
        return Views.dihedral(int(values))
    if name == "scales":
        return Views.scales(*map(float, values.split(",")))
    share = float(values)
    if not 0 < share < 0.5:
        raise ValueError(values)
    return Views.shifts((0, 0), (share, 0), (-share, 0), (0, share), (0, -share))


def parse_tiling(*, tile: int | None, **given: Any) -> "Tiling | None":
    """How rasters are cut, from the options of the command line; None without --tile."""
    from equicam.data.rasters.options import Input, Tiling

    named = {name: value for name, value in given.items() if value not in (None, 0.0)}
    if tile is None:
        if named:
            name = next(iter(named)).replace("_", "-")
            raise EquicamError(f"--{name}", needs="--tile, the size of windows", got="none", fix="--tile 224")
        return None
    stride = named.get("stride", "tile")
    chosen = Input(
        bands=named.get("bands"), scale=named.get("scale"), mpp=named.get("mpp"), display=named.get("display"),
        mean=_numbers("mean", named.get("mean")), std=_numbers("std", named.get("std")),
    )  # fmt: skip
    return Tiling(
        tile, int(stride) if stride.isdecimal() else stride, given["tissue"], mpp_is=named.get("mpp_is"),
        regions=named.get("regions"), input=chosen,
    )  # fmt: skip


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(one) for one in text.split(","))
    except ValueError as error:
        raise EquicamError(
            f"--{name}", needs="numbers", got=repr(text), fix=f"--{name} 0.5,0.5,0.5"
        ) from error


def parse_dtype(name: str | None) -> "torch.dtype | None":
    """The type to run the network in."""
    import torch

    known = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise EquicamError("dtype", needs="bfloat16 or float16", got=repr(name), fix="--dtype bfloat16")
    return known[name]


def split_commas(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def resolve_device(device: str | None) -> str:
    """The given device; else a GPU, where torch can use one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def load_on_engine(
    name: str,
    weights: str | None,
    classes: str | None,
    layer: str | None,
    compiled: bool,
    *,
    device: str | None,
    engine: str,
    address: str | None,
    actors: int | None,
) -> "tuple[Model, Devices | Cluster | None]":
    """The model, and the engine that computes, if not this process alone."""
    from equicam.engines.worker import ModelFromName
    from equicam.models.names import absolute_model, absolute_weights

    names = None if classes is None else tuple(split_commas(classes) or ())
    source = ModelFromName(absolute_model(name), absolute_weights(weights), names, layer, compiled)
    device, chosen = resolve_engine(engine, address, actors, device, source)
    return source(device), chosen


def resolve_engine(
    engine: str, address: str | None, actors: int | None, device: str | None, source: "ModelFromName"
) -> "tuple[str, Devices | Cluster | None]":
    """The device of this process's own model, and the engine that computes, if not this process alone."""
    from equicam.engines.devices import Devices

    if engine == "ray":
        from equicam.engines.ray import Cluster, best_device

        return "cpu", Cluster(device or best_device(address), address, actors, source)
    if engine != "local":
        raise EquicamError("engine", needs="local or ray", got=repr(engine), fix="--engine ray")
    if address is not None or actors is not None:
        raise EquicamError(
            "--address and --actors", needs="--engine ray", got="--engine local", fix="--engine ray"
        )
    names = split_commas(device) or []
    return ("cpu", Devices(tuple(names), source)) if len(names) > 1 else (resolve_device(device), None)


@contextmanager
def audit_progress() -> Iterator[Callable[[int, int, int], None]]:
    """A bar with images per second and the time left; without a terminal, a line every ten seconds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    start = last = time.monotonic()
    if not console.is_terminal:

        def line(done: int, total: int, computed: int) -> None:
            nonlocal last
            if time.monotonic() - last >= 10 or done == total:
                last = time.monotonic()
                rate = computed / max(1e-9, last - start)
                console.print(
                    f"{done:,} of {total:,} images, {rate:.1f}/s, {(total - done) / rate:,.0f} s left"
                )

        yield line
        return
    columns = (
        TextColumn("auditing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("auditing", total=None, rate="")

        def update(done: int, total: int, computed: int) -> None:
            rate = computed / max(1e-9, time.monotonic() - start)
            bar.update(task, completed=done, total=total, rate=f"{rate:.1f}/s")

        yield update


@contextmanager
def count_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that the yielded function advances."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
