"""What `explain` returns: tensors by image, a line of text for each, and drawings of them on request."""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8, jaxtyped
from torch import Tensor

from equicam import __version__
from equicam.core.transforms import presented_index
from equicam.core.views import Views
from equicam.errors import EquicamError
from equicam.models.images import denormalise
from equicam.models.weights import UNREADABLE
from equicam.readers.names import Task, output_name
from equicam.reasons import PEUM_NOTE
from equicam.steadiness import UNJUDGED_FLAGS, Steadiness, judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from equicam.drawing.explanation_figure import ImageDrawing

MAX_LINES = 32
"""Images that are printed."""
MAX_IN_NOTEBOOK = 16
"""Images that a notebook shows."""
MAX_PLOTTED = 8
"""Rows of a figure, unless the caller wants more."""
FIGURE_FILES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
TENSORS = "explanation.pt"  # in a folder
TENSOR_FILES = (".pt", ".pth")
UNKNOWN_IMAGE_GREY = 214
"""Under maps whose image is not known."""


@dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """What `explain` returns, per image, on the model's device.

    `e[0]`, `e[2:5]` and `e[[3, 1]]` are explanations of some of the images, and iterating gives one image after the other.
    """

    map: Float[Tensor, "b H W"]  # in [0, 1]
    raw: Float[Tensor, "b H W"]  # just before the last min–max
    peum: Float[
        Tensor, "b H W"
    ]  # PEUM (per-image explanation uncertainty): variance of the views' aligned maps
    peum_score: Float[Tensor, " b"]  # mean of peum
    stability: Float[
        Tensor, " b"
    ]  # mean Pearson of the presented view's own map with every other's, aligned; NaN for one view
    stability_by_view: Float[Tensor, "b t"]  # the same for each view
    target: Int[Tensor, " b"]  # the class explained
    confidence: Float[Tensor, " b"]  # its probability in the presented image; NaN where a value is explained
    view_confidence: Float[Tensor, "b t"]  # its probability in each view
    view_top1: Int[Tensor, "b t"]  # each view's top-1 (of labels: the target where the view has it)
    view_flips: Bool[Tensor, "b t"]  # views whose top-1 is not the presented image's
    view_kept: Bool[Tensor, "b t"]  # views the weigher kept
    layer_map: Float[Tensor, "b h w"]  # raw at the layer's resolution, rectified
    view_maps: Float[
        Tensor, "b t h w"
    ]  # each view's own rectified plane at the layer's resolution, not aligned
    flags: tuple[frozenset[str], ...]  # of blank, constant, flipped, none-kept, low-coverage, odd-size, edge
    views: Views
    layer: str | None = None
    probabilities: Float[Tensor, "b y"] | None = None  # of the presented image; None without model or classes
    output: Float[Tensor, " b"] | None = None  # the class's logit, or the value that is explained
    inputs: Float[Tensor, "b c H W"] | None = None  # the model's input: the caller's own tensor, not a copy
    mean: tuple[float, ...] | None = None  # of the input's normalisation; None: unknown
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None
    task: Task | None = None  # the model's
    is_only_output: bool = False  # whether the value explained is the only one there is

    def __len__(self) -> int:
        return len(self.target)

    @cached_property
    def steadiness(self) -> tuple[Steadiness, ...]:
        """Of each image: steady, unsteady or cannot say, with the reason that matters most."""
        rows = zip(self.stability_by_view.tolist(), self.view_top1.tolist(), self.flags, strict=True)
        presented, labels = presented_index(self.views.transforms), self.views.labels
        return tuple(judge(values, top1, labels, flags, presented) for values, top1, flags in rows)

    @cached_property
    def has_peum(self) -> tuple[bool, ...]:
        """Of each image: whether it has a PEUM; a flat map has none, and one view, or one that was kept, has no variance."""
        kept = self.view_kept.sum(1).tolist()
        return tuple(
            len(self.views) > 1 and count > 1 and flags.isdisjoint(UNJUDGED_FLAGS)
            for count, flags in zip(kept, self.flags, strict=True)
        )

    def __getitem__(self, index: Any) -> "Explanation":
        """Some of the images: by number, slice, list of numbers or mask."""
        if isinstance(index, slice):
            rows = list(range(len(self)))[index]
        elif isinstance(index, Tensor | np.ndarray | list | tuple):
            found = torch.as_tensor(index)
            is_mask = found.dtype == torch.bool
            if is_mask and found.shape != (len(self),):
                raise IndexError(f"a mask of {len(self)} images, got {tuple(found.shape)}")
            if found.is_floating_point() and found.numel():
                raise IndexError(_no_index(index))
            chosen = found.nonzero().flatten() if is_mask else found.flatten()
            rows = [self._row(i) for i in chosen.tolist()]
        elif isinstance(index, bool) or not hasattr(index, "__index__"):
            raise IndexError(_no_index(index))
        else:
            rows = [self._row(operator.index(index))]
        at = torch.tensor(rows, dtype=torch.long, device=self.target.device)
        some: dict[str, Any] = {name: value[at.to(value.device)] for name, value in self._tensors().items()}
        return replace(self, **some, flags=tuple(self.flags[i] for i in rows))

    def _row(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"an explanation of {len(self)} image{'s' * (len(self) != 1)} has no image {index}"
            )
        return index % len(self)

    def __iter__(self) -> Iterator["Explanation"]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        several = f"{len(self.views)} views" if len(self.views) > 1 else "one view"
        head = f"Explanation of {len(self)} image{'' if len(self) == 1 else 's'}, {several}"
        head += "" if self.layer is None else f", layer {self.layer!r}"
        lines = [f"  {i}  {'; '.join(facts)}" for i, facts in enumerate(describe_images(self[:MAX_LINES]))]
        note = [f"  {PEUM_NOTE}"] if lines and len(self.views) > 1 else []
        rest = len(self) - MAX_LINES
        return "\n".join([head, *note, *lines, *([f"  … and {rest:,} more"] if rest > 0 else [])])

    def cpu(self) -> "Explanation":
        """The same on the CPU."""
        moved: dict[str, Any] = {name: value.cpu() for name, value in self._tensors().items()}
        return replace(self, **moved)

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Every tensor as an array, by name."""
        return {name: value.detach().cpu().numpy() for name, value in self._tensors().items()}

    def overlay(self) -> UInt8[np.ndarray, "b H W 3"]:
        """The maps as colours over the images, 8-bit RGB; `PIL.Image.fromarray(e.overlay()[0])` is an image."""
        from equicam.overlay import overlay

        maps = self.map.detach().float().cpu().numpy()
        found = self._images()
        if found is None:
            found = np.full((*maps.shape, 3), UNKNOWN_IMAGE_GREY, dtype=np.uint8)
        for i, values in enumerate(maps):
            found[i] = overlay(found[i], values)
        return found

    def plot(self, *, images: int = MAX_PLOTTED) -> "Figure":
        """A figure of the first images, a row each: image, own map of one view, map, PEUM, and stability over the views."""
        from equicam.drawing.explanation_figure import draw_figure

        return draw_figure(self._drawings(images), len(self))

    def show(self, *, images: int = MAX_PLOTTED) -> None:
        """Show the figure: in a notebook's cell, or in a window."""
        from equicam.drawing.explanation_figure import show_figure

        show_figure(self.plot(images=images))

    def save(self, path: str | Path) -> Path:
        """Write a figure (`.png`, `.jpg`, `.pdf`, `.svg`), the tensors (`.pt`, for `Explanation.load`), or a folder of both.

        A folder gets an overlay and a figure for each image, and `explanation.pt`.
        """
        from equicam.drawing.explanation_figure import write_figure, write_image

        path = Path(path)
        kind = path.suffix.lower()
        if kind in TENSOR_FILES:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.state(), path)
        elif kind in FIGURE_FILES:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_figure(self.plot(images=len(self)), path)
        elif kind:
            raise EquicamError(
                "save", f"a folder, or a file that ends in {', '.join((*FIGURE_FILES, *TENSOR_FILES))}", repr(path.name),
                '"explained.png"',
            )  # fmt: skip
        else:
            path.mkdir(parents=True, exist_ok=True)
            digits = len(str(max(0, len(self) - 1)))
            for i, one in enumerate(self):
                write_image(one.overlay()[0], path / f"{i:0{digits}d}.overlay.png")
                write_figure(one.plot(), path / f"{i:0{digits}d}.png")
            torch.save(self.state(), path / TENSORS)
        return path

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, which `torch.save` writes and `torch.load(…, weights_only=True)` reads."""
        found = self.cpu()
        # cloned, because torch writes the whole storage behind a slice
        tensors = {name: value.detach().clone() for name, value in found._tensors().items()}
        return found._plain() | tensors

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its state, on its device, so that `torch.save(e, …)` is read by `torch.load`, which runs no code."""
        tensors = {name: value.detach().clone() for name, value in self._tensors().items()}
        return restore, (self._plain() | tensors,)

    @staticmethod
    def load(path: str | Path) -> "Explanation":
        """An explanation that `save` wrote, from the file or its folder; no code in the file is run."""
        path = Path(path)
        what, file = f"the explanation {str(path)!r}", path / TENSORS if path.is_dir() else path
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except (*UNREADABLE, OSError) as error:
            raise not_stored(what, type(error).__name__) from error
        return found if isinstance(found, Explanation) else read_state(found, what)

    def _tensors(self) -> dict[str, Tensor]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _plain(self) -> dict[str, Any]:
        """Everything but the tensors, as values that torch reads without running code."""
        names = ("layer", "mean", "std", "classes", "task", "is_only_output")
        flags, views = [sorted(one) for one in self.flags], list(self.views.to_plain())
        plain = {name: getattr(self, name) for name in names}
        return {"equicam": __version__, "views": views, "flags": flags} | plain

    def _images(self) -> UInt8[np.ndarray, "b H W 3"] | None:
        """The model's input as 8-bit RGB, its normalisation inverted; None where it is not known."""
        return None if self.inputs is None else denormalise(self.inputs, self.mean, self.std)

    def _drawings(self, count: int) -> "list[ImageDrawing]":
        """The first images as arrays and text."""
        from equicam.drawing.explanation_figure import ImageDrawing
        from equicam.overlay import overlay, stretch

        some, several = self[:count], len(self.views) > 1
        images, overlays, arrays = some._images(), some.overlay(), some.to_numpy()
        presented, size = presented_index(self.views.transforms), (overlays.shape[1], overlays.shape[2])
        grey = np.full((*size, 3), UNKNOWN_IMAGE_GREY, dtype=np.uint8)

        def own_map(i: int) -> UInt8[np.ndarray, "H W 3"] | None:
            if not several or presented is None:
                return None
            under = grey if images is None else images[i]
            return overlay(under, stretch(arrays["view_maps"][i, presented], size))

        return [
            ImageDrawing(
                title=title,
                facts=tuple(facts),
                image=None if images is None else images[i],
                overlay=overlays[i],
                own=own_map(i),
                word=some.steadiness[i].word,
                peum=arrays["peum"][i] if several else None,
                transforms=self.views.transforms,
                correlations=tuple(arrays["stability_by_view"][i].tolist()),
            )
            for i, (title, *facts) in enumerate(describe_images(some))
        ]

    def _repr_html_(self) -> str:
        from equicam.drawing.explanation_figure import draw_html

        return draw_html(self._drawings(MAX_IN_NOTEBOOK), len(self))


def describe_images(e: Explanation) -> list[list[str]]:
    """What is printed of each image: class and confidence first, then steadiness, PEUM, flips and flags.

    One view has no PEUM.
    """
    outputs = [math.nan] * len(e) if e.output is None else e.output.tolist()
    explained = zip(e.target.tolist(), e.confidence.tolist(), outputs, strict=True)
    found = [[_title(e, *one)] for one in explained]
    flips, others = e.view_flips.sum(1).tolist(), len(e.views) - 1
    for i, facts in enumerate(found):
        facts.append(str(e.steadiness[i]))
        facts += [_describe_peum(e, i)] if len(e.views) > 1 else []
        reason = e.steadiness[i].reason
        known = reason.code == "prediction-changes" or reason.values.get("changed")
        facts += [f"{flips[i]} of {others} other views flip"] if flips[i] and not known else []
        flags = sorted(e.flags[i] - {"flipped"})  # the line before says it
        facts += [f"flags {', '.join(flags)}"] if flags else []
    return found


def _describe_peum(e: Explanation, i: int) -> str:
    """The PEUM of an image of several views."""
    return f"PEUM {float(e.peum_score[i]):.4f}" if e.has_peum[i] else "PEUM undefined"


def _title(e: Explanation, target: int, confidence: float, output: float) -> str:
    """The class and its confidence, or what is explained and its value."""
    name = output_name(target, e.classes, e.task, is_only=e.is_only_output)
    name = "".join(letter if letter.isprintable() else "�" for letter in name)
    if not math.isnan(confidence):
        return f"{name} (p = {confidence:.2f})"
    return name if math.isnan(output) else f"{name} = {output:.4g}"


def restore(state: Any) -> Explanation:
    """The explanation of a state, checked. A pickle of an explanation calls it, and `torch.load` may."""
    return read_state(state, "a stored explanation")


torch.serialization.add_safe_globals([restore])


def _no_index(index: Any) -> str:
    return f"an index needs a number, a slice, a list of numbers or a mask, got {index!r}; try e[0]"


def read_state(found: Any, what: str) -> Explanation:
    """An explanation of its state, checked: anybody may have written the file. `what` names it in errors."""
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise not_stored(what, type(found).__name__)
    if missing := [f.name for f in fields(Explanation) if f.default is MISSING and f.name not in found]:
        raise not_stored(what, f"one without {', '.join(missing)}")
    given = {f.name: found[f.name] for f in fields(Explanation) if f.name in found}
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
    _refuse_shapes(given, what)
    return Explanation(**given)


def not_stored(what: str, got: str) -> EquicamError:
    """The error for a file of something else."""
    return EquicamError(what, "a file that Explanation.save wrote", got, 'e.save("explanation.pt")')


def _refuse_shapes(given: dict[str, Any], what: str) -> None:
    """Refuse tensors whose types are others, or whose shapes do not agree with each other, the views and the flags."""
    about = f"{len(given['flags'])} images in {len(given['views'])} views"
    tensors = [f for f in fields(Explanation) if f.name not in (*PLAIN, "is_only_output")]
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
