"""Helpers of several commands: values parsed from text, the model and the engine."""

import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from equicam.console import note, parse_dtype, resolve_device, say, show_progress, split_commas
from equicam.errors import EquicamError

if TYPE_CHECKING:
    import torch

    from equicam.core.views import Views
    from equicam.engines.devices import Devices
    from equicam.engines.ray import Cluster
    from equicam.engines.worker import ModelFromName
    from equicam.rasters.options import Tiling
    from equicam.readers.model import Model
    from equicam.runs.review.server import Links

NAMED_VIEWS = {"dihedral": "dihedral:18", "scales": "scales:0.8,1,1.25", "shifts": "shifts:0.05"}
"""Sets of views that have a name, as they are typed."""


def parse_views(text: str | None) -> "int | Views | None":
    """A number of views, or a set of them by name."""
    if text is None:
        return None
    if text.isdecimal() and int(text):
        return int(text)
    name, _, values = text.partition(":")
    try:
        return _named_views(name, values)
    except ValueError as error:
        raise EquicamError(
            "--views",
            "a number from 1 on, dihedral: and an even number, scales: and factors above 0, or shifts: and a share below 0.5",
            repr(text), f"--views {NAMED_VIEWS.get(name, '18')}",
        ) from error  # fmt: skip


def parse_window(text: str | None) -> tuple[float, float] | None:
    """Centre and width of a window, separated by a comma."""
    if text is None:
        return None
    try:
        centre, width = map(float, text.split(","))
    except ValueError as error:
        raise EquicamError("--voi", "CENTER,WIDTH, two numbers", repr(text), "--voi 40,400") from error
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


def parse_tiling(*, tile: int | None, size: int | None, crop: int | None, **given: Any) -> "Tiling | None":
    """How rasters are cut, from the options of the command line; None without --tile."""
    from equicam.rasters.options import Input, Tiling

    named = {name: value for name, value in given.items() if value not in (None, 0.0)}
    if tile is None:
        if only_tiles := [name for name in named if name not in ("mean", "std")]:
            name = only_tiles[0].replace("_", "-")
            raise EquicamError(f"--{name}", "--tile, the size of windows", "none", "--tile 224")
        return None
    if size is not None or crop is not None:
        raise EquicamError(
            "--size and --crop", "images", "--tile", "--tile for the size of windows, and --mpp for their resolution",
        )  # fmt: skip
    stride = named.get("stride", "tile")
    chosen = Input(
        bands=named.get("bands"), scale=named.get("scale"), mpp=named.get("mpp"), display=named.get("display"),
        mean=parse_numbers("mean", named.get("mean")), std=parse_numbers("std", named.get("std")),
    )  # fmt: skip
    return Tiling(
        tile, int(stride) if stride.isdecimal() else stride, given["tissue"], mpp_is=named.get("mpp_is"),
        regions=named.get("regions"), input=chosen,
    )  # fmt: skip


def parse_numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers separated by commas."""
    try:
        return None if text is None else tuple(float(one) for one in text.split(","))
    except ValueError as error:
        raise EquicamError(f"--{name}", "numbers", repr(text), f"--{name} 0.5,0.5,0.5") from error


def set_preprocessing(
    model: "Model", size: int | None, crop: int | None, mean: str | None, std: str | None
) -> "Model":
    """The model with the preprocessing of the options; a line says what it is."""
    from equicam.models.preprocessing import preprocessing_facts, preprocessing_sentence, with_preprocessing

    model = with_preprocessing(
        model, size=size, crop=crop, mean=parse_numbers("mean", mean), std=parse_numbers("std", std)
    )
    note_embedded(model.name)
    note(preprocessing_sentence(preprocessing_facts(model)))
    return model


def parse_speed(
    fast: bool, dtype: str | None, compiled: bool | None, device: str | None
) -> "tuple[torch.dtype | None, bool | None]":
    """The type to run the network in, and whether it is compiled (None: where that is repaid)."""
    import torch

    chosen = parse_dtype(dtype)
    if not fast:
        return chosen, compiled
    where = resolve_device(device).partition(":")[0]
    if where != "cuda" or compiled is False:
        got = "--no-compile" if compiled is False else f"--device {where}"
        raise EquicamError("--fast", "a GPU, and to compile", got, "leaving --fast out")
    return chosen or torch.bfloat16, True


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
    size: int | None,
    crop: int | None,
    mean: str | None,
    std: str | None,
    tiling: "Tiling | None" = None,
) -> "tuple[Model, Devices | Cluster | None]":
    """The model, and the engine that computes, if not this process alone."""
    from equicam.engines.worker import ModelFromName
    from equicam.models.preprocessing import Preprocessing, preprocessing_facts, preprocessing_sentence
    from equicam.readers.names import absolute_model, absolute_weights

    names = None if classes is None else tuple(split_commas(classes) or ())
    source = ModelFromName(absolute_model(name), absolute_weights(weights), names, layer, compiled)
    device, chosen = resolve_engine(engine, address, actors, device, source)
    model = source(device)
    if tiling is not None:  # whose input has the mean and std of the options
        whole = replace(tiling, input=tiling.input.or_else(model.input))
        note(preprocessing_sentence(preprocessing_facts(model, whole), tiles=True))
        return model, chosen
    model = set_preprocessing(model, size, crop, mean, std)
    if chosen is not None and isinstance(model.preprocess, Preprocessing):
        chosen = replace(chosen, model_source=replace(source, preprocessing=model.preprocess))
    return model, chosen


def resolve_engine(
    engine: str, address: str | None, actors: int | None, device: str | None, source: "ModelFromName"
) -> "tuple[str, Devices | Cluster | None]":
    """The device of this process's own model, and the engine that computes, if not this process alone."""
    from equicam.engines.devices import Devices

    if engine == "ray":
        from equicam.engines.ray import Cluster, best_device

        return "cpu", Cluster(device or best_device(address), address, actors, source)
    if engine != "local":
        raise EquicamError("engine", "local or ray", repr(engine), "--engine ray")
    if address is not None or actors is not None:
        raise EquicamError("--address and --actors", "--engine ray", "--engine local", "--engine ray")
    names = split_commas(device) or []
    return ("cpu", Devices(tuple(names), source)) if len(names) > 1 else (resolve_device(device), None)


@contextmanager
def count_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress that the yielded function advances."""
    with show_progress(title, total) as progress:
        yield progress.advance


def note_embedded(name: str | None) -> None:
    """Say that the embedded model is a toy, which is the model where none is named."""
    if name == "embedded":
        note(
            "model embedded: small, synthetic, for demonstrations only; name yours, such as --model resnet50"
        )


@contextmanager
def needing_web_server(command: str) -> Iterator[None]:
    """Name the extra that installs the web libraries, whose import fails without it."""
    try:
        yield
    except ImportError as error:
        raise EquicamError(
            command, "FastAPI and uvicorn", f"no module {error.name}", "pip install 'equicam[review]'"
        ) from error


def announce_page(name: str, links: "Links", ending: str, *, browser: bool) -> None:
    """Print the addresses of a page and how it ends, and open the one for everybody in a browser."""
    for reviewer, address in links.items():
        say(f"{name}: {address}" if reviewer is None else f"{name} as {reviewer}: {address}")
    note(ending)
    if browser and None in links:
        threading.Thread(target=webbrowser.open, args=(links[None],), daemon=True).start()
