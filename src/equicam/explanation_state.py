"""The state of an explanation, as files hold it: checked when it is read, because anybody may have written the file."""

import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_args

from jaxtyping import jaxtyped
from torch import Tensor

from equicam.core.views import Views
from equicam.errors import EquicamError
from equicam.readers.names import Task


def read_state(found: Any, kind: Any, what: str) -> dict[str, Any]:
    """The arguments of the dataclass `kind`, whose annotations say which shapes must agree; `what` names it in errors."""
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise not_stored(what, type(found).__name__)
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in found]:
        raise not_stored(what, f"one without {', '.join(missing)}")
    given = {f.name: found[f.name] for f in fields(kind) if f.name in found}
    for name, (is_valid, needed) in PLAIN.items():
        if not is_valid(given.get(name)):
            raise not_stored(what, f"{name} other than {needed}")
    for name in ("mean", "std", "classes"):
        given[name] = None if given.get(name) is None else tuple(given[name])
    try:
        given["views"] = Views([tuple(one) if isinstance(one, list) else one for one in given["views"]])
    except (EquicamError, *NOT_VIEWS) as error:
        raise not_stored(what, "views that cannot be read") from error
    given["flags"] = tuple(frozenset(one) for one in given["flags"])
    given["is_only_output"] = given.get("is_only_output") is True
    _refuse_shapes(given, kind, what)
    return given


def not_stored(what: str, got: str) -> EquicamError:
    """The error for a file of something else."""
    return EquicamError(
        what, needs="a file that Explanation.save wrote", got=got, fix='e.save("explanation.pt")'
    )


def _refuse_shapes(given: dict[str, Any], kind: Any, what: str) -> None:
    """Refuse tensors whose types are others, or whose shapes do not agree with each other, the views and the flags."""
    about = f"{len(given['flags'])} images in {len(given['views'])} views"
    tensors = [f for f in fields(kind) if f.name not in (*PLAIN, "is_only_output")]
    with jaxtyped("context"):  # b, t, H and W are the same in all annotations
        for one in tensors:
            value: Any = given.get(one.name)
            annotation: Any = one.type
            if not isinstance(value, annotation):
                got = type(value).__name__
                if isinstance(value, Tensor):
                    got = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
                raise not_stored(what, f"{one.name} {got} next to {about}")
    images, views = given["view_kept"].shape
    if (images, views) != (len(given["flags"]), len(given["views"])):
        raise not_stored(what, f"tensors of {images} images in {views} views next to {about}")


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(one, str) for one in values)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in values
    )


NOT_VIEWS = (TypeError, ValueError, LookupError)
PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "views": (lambda value: isinstance(value, list | tuple), "a list"),
    "flags": (lambda value: isinstance(value, list | tuple) and all(map(_are_texts, value)), "lists of text"),
    "layer": (lambda value: value is None or isinstance(value, str), "text"),
    "mean": (lambda value: value is None or _are_numbers(value), "finite numbers"),
    "std": (lambda value: value is None or _are_numbers(value), "finite numbers"),
    "classes": (lambda value: value is None or _are_texts(value), "text"),
    "task": (
        lambda value: value is None or value in get_args(Task),
        f"one of {', '.join(get_args(Task))}",
    ),
}
"""The values that are no tensors: whether one is valid, and what it must be."""
