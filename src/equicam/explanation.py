"""What `explain` returns: tensors by image, a line of text for each, and drawings of them on request."""

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8, jaxtyped
from PIL import Image
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

MAX_LINES, MAX_IN_NOTEBOOK, MAX_PLOTTED = 32, 16, 8
"""Images that are printed, shown in a notebook, and drawn as rows of a figure unless the caller wants more."""
FIGURE_FILES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
TENSORS = "explanation.pt"  # in a folder
TENSOR_FILES = (".pt", ".pth")
UNKNOWN_IMAGE_GREY = 214  # under maps whose image is not known


@dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """What `explain` returns, per image, on the model's device.

    `e[0]`, `e[2:5]` and `e[[3, 1]]` are explanations of some of the images, and iterating gives one image after the other.
    """

    map: Float[Tensor, "b H W"]  # in [0, 1]
    raw: Float[Tensor, "b H W"]  # just before the last min–max
    peum: Float[Tensor, "b H W"]  # PEUM (per-image explanation uncertainty): variance of aligned maps
    peum_score: Float[Tensor, " b"]  # mean of peum
    stability: Float[Tensor, " b"]  # mean of stability_by_view over the other views; NaN for one view
    stability_by_view: Float[Tensor, "b t"]  # Pearson of its own map with the presented view's, aligned
    agreement: Float[
        Tensor, "b g j"
    ]  # the share of views in whose hottest fifth a cell of a coarse grid lies
    coarse_outline: Bool[Tensor, "b g j"]  # the part that enough of them agree on, on the same grid
    agreed_area: Float[Tensor, " b"]  # share of the disc inside the outline; NaN below six views
    repeatability: Float[Tensor, " b"]  # Pearson of the maps from one half of the views and the other
    target: Int[Tensor, " b"]  # the class explained
    confidence: Float[Tensor, " b"]  # its probability in the presented image; NaN where a value is explained
    view_confidence: Float[Tensor, "b t"]  # its probability in each view
    view_top1: Int[Tensor, "b t"]  # each view's top-1 (of labels: the target where the view has it)
    view_flips: Bool[Tensor, "b t"]  # views whose top-1 is not the presented image's
    view_kept: Bool[Tensor, "b t"]  # views the weigher kept
    layer_map: Float[Tensor, "b h w"]  # raw at the layer's resolution, rectified
    view_maps: Float[Tensor, "b t h w"]  # each view's rectified plane at the layer's resolution, not aligned
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
        rows = np.arange(len(self))
        if isinstance(index, slice):
            rows = rows[index]
        else:
            chosen = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
            if not chosen.size and chosen.dtype.kind == "f":  # an empty list
                chosen = chosen.astype(int)
            try:
                if chosen.dtype.kind not in "iub" or (chosen.dtype.kind == "b" and not chosen.ndim):
                    raise IndexError("neither whole numbers nor a mask")
                rows = np.ravel(rows[chosen])
            except IndexError as error:
                raise IndexError(
                    f"an index of {len(self)} image{'s' * (len(self) != 1)} needs a number, a slice, a list of numbers or a "
                    f"mask, got {index!r}; try e[0]"
                ) from error
        at = torch.tensor(rows.tolist(), dtype=torch.long, device=self.target.device)
        some: dict[str, Any] = {name: value[at.to(value.device)] for name, value in self._tensors().items()}
        return replace(self, **some, flags=tuple(self.flags[i] for i in rows))

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

        found = self._images()
        for image, values in zip(found, self.map.detach().float().cpu().numpy(), strict=True):
            image[:] = overlay(image, values)
        return found

    def _images(self) -> UInt8[np.ndarray, "b H W 3"]:
        """The model's input as 8-bit RGB, its normalisation inverted; grey where it is not known."""
        if self.inputs is None:
            return np.full((*self.map.shape, 3), UNKNOWN_IMAGE_GREY, dtype=np.uint8)
        return denormalise(self.inputs, self.mean, self.std)

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
        from equicam.drawing.explanation_figure import write_figure

        path = Path(path)
        kind = path.suffix.lower()
        if kind and kind not in (*FIGURE_FILES, *TENSOR_FILES):
            raise EquicamError(
                "save", f"a folder, or a file that ends in {', '.join((*FIGURE_FILES, *TENSOR_FILES))}", repr(path.name),
                '"explained.png"',
            )  # fmt: skip
        (path.parent if kind else path).mkdir(parents=True, exist_ok=True)
        if kind in FIGURE_FILES:
            write_figure(self.plot(images=len(self)), path)
            return path
        torch.save(self.state(), path if kind else path / TENSORS)
        if not kind:
            digits = len(str(max(0, len(self) - 1)))
            for i, one in enumerate(self):
                Image.fromarray(one.overlay()[0]).save(path / f"{i:0{digits}d}.overlay.png")
                write_figure(one.plot(), path / f"{i:0{digits}d}.png")
        return path

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, which `torch.save` writes and `torch.load(…, weights_only=True)` reads."""
        return self.cpu()._state()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its state, on its device, so that `torch.save(e, …)` is read by `torch.load`, which runs no code."""
        return restore, (self._state(),)

    @staticmethod
    def load(path: str | Path) -> "Explanation":
        """An explanation that `save` wrote, from the file or its folder; no code in the file is run."""
        path = Path(path)
        what, file = f"the explanation {str(path)!r}", path / TENSORS if path.is_dir() else path
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except (*UNREADABLE, OSError) as error:
            raise _not_stored(what, type(error).__name__) from error
        return found if isinstance(found, Explanation) else _read_state(found, what)

    def _tensors(self) -> dict[str, Tensor]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _state(self) -> dict[str, Any]:
        """Tensors, and everything else as values that torch reads without running code."""
        names = ("layer", "mean", "std", "classes", "task", "is_only_output")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        state |= {"equicam": __version__, "views": list(self.views.to_plain())}
        state["flags"] = [sorted(one) for one in self.flags]
        # cloned, because torch writes the whole storage behind a slice
        return state | {name: value.detach().clone() for name, value in self._tensors().items()}

    def _drawings(self, count: int) -> "list[ImageDrawing]":
        """The first images as arrays and text."""
        from equicam.drawing.explanation_figure import ImageDrawing
        from equicam.overlay import overlay, stretch

        some, several = self[:count], len(self.views) > 1
        presented, arrays = presented_index(self.views.transforms), some.to_numpy()
        images, overlays = some._images(), some.overlay()
        drawings = []
        for i, (title, *facts) in enumerate(describe_images(some)):
            image, own = None if self.inputs is None else images[i], None
            if several and presented is not None:
                own = overlay(images[i], stretch(arrays["view_maps"][i, presented], images.shape[1:3]))
            peum, correlations = arrays["peum"][i] if several else None, arrays["stability_by_view"][i]
            drawing = ImageDrawing(
                title, tuple(facts), image, overlays[i], own, some.steadiness[i].word, peum, self.views.transforms,
                tuple(correlations.tolist()),
            )  # fmt: skip
            drawings.append(drawing)
        return drawings

    def _repr_html_(self) -> str:
        from equicam.drawing.explanation_figure import draw_html

        return draw_html(self._drawings(MAX_IN_NOTEBOOK), len(self))


def describe_images(e: Explanation) -> list[list[str]]:
    """What is printed of each image: class and confidence, or value, first, then steadiness, PEUM, flips and flags."""
    outputs = [math.nan] * len(e) if e.output is None else e.output.tolist()
    flips = e.view_flips.sum(1).tolist()
    explained = zip(e.target.tolist(), e.confidence.tolist(), outputs, strict=True)
    found = []
    for i, (target, confidence, output) in enumerate(explained):
        name = output_name(target, e.classes, e.task, is_only=e.is_only_output)
        title = "".join(letter if letter.isprintable() else "�" for letter in name)
        if not math.isnan(confidence):
            title += f" (p = {confidence:.2f})"
        elif not math.isnan(output):
            title += f" = {output:.4g}"
        facts, reason = [title, str(e.steadiness[i])], e.steadiness[i].reason
        if len(e.views) > 1:  # one view has no PEUM
            facts.append(f"PEUM {float(e.peum_score[i]):.4f}" if e.has_peum[i] else "PEUM undefined")
        if flips[i] and reason.code != "prediction-changes" and not reason.values.get("changed"):
            facts.append(f"{flips[i]} of {len(e.views) - 1} other views flip")
        if flags := sorted(e.flags[i] - {"flipped"}):  # the line before says it
            facts.append(f"flags {', '.join(flags)}")
        found.append(facts)
    return found


def restore(state: Any) -> Explanation:
    """The explanation of a state, checked. A pickle of an explanation calls it, and `torch.load` may."""
    return _read_state(state, "a stored explanation")


torch.serialization.add_safe_globals([restore])


def _read_state(found: Any, what: str) -> Explanation:
    """An explanation of its state, checked: anybody may have written the file. `what` names it in errors."""
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise _not_stored(what, type(found).__name__)
    if missing := [f.name for f in fields(Explanation) if f.default is MISSING and f.name not in found]:
        raise _not_stored(what, f"one without {', '.join(missing)}")
    given: dict[str, Any] = {f.name: found.get(f.name) for f in fields(Explanation)}
    for name, (is_valid, needed) in _PLAIN.items():
        if not is_valid(given[name]) and (given[name] is not None or name in ("views", "flags")):
            raise _not_stored(what, f"{name} other than {needed}")
    for name in ("mean", "std", "classes"):
        given[name] = None if given[name] is None else tuple(given[name])
    try:
        given["views"] = Views([tuple(one) if isinstance(one, list) else one for one in given["views"]])
    except (EquicamError, TypeError, ValueError, LookupError) as error:
        raise _not_stored(what, "views that cannot be read") from error
    given["flags"] = tuple(frozenset(one) for one in given["flags"])
    given["is_only_output"] = given["is_only_output"] is True
    # tensors of other types, or whose shapes do not agree with each other, the views and the flags
    about = f"{len(given['flags'])} images in {len(given['views'])} views"
    with jaxtyped("context"):  # b, t, H and W are the same in all annotations
        for one in fields(Explanation):
            value, annotation = given[one.name], one.type
            if one.name not in (*_PLAIN, "is_only_output") and not isinstance(value, annotation):  # type: ignore[arg-type]
                got = type(value).__name__
                if isinstance(value, Tensor):
                    got = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
                raise _not_stored(what, f"{one.name} {got} next to {about}")
    images, views = given["view_kept"].shape
    if (images, views) != (len(given["flags"]), len(given["views"])):
        raise _not_stored(what, f"tensors of {images} images in {views} views next to {about}")
    return Explanation(**given)


def _not_stored(what: str, got: str) -> EquicamError:
    return EquicamError(what, "a file that Explanation.save wrote", got, 'e.save("explanation.pt")')


def _are(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list of valid ones."""
    return lambda values: isinstance(values, list | tuple) and all(map(is_valid, values))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "views": (_are(lambda _: True), "a list"),
    "flags": (_are(_are(_is_text)), "lists of text"),
    "layer": (_is_text, "text"),
    "mean": (_are(_is_number), "finite numbers"),
    "std": (_are(_is_number), "finite numbers"),
    "classes": (_are(_is_text), "text"),
    "task": (lambda value: value in get_args(Task), f"one of {', '.join(get_args(Task))}"),
}
"""The values that are no tensors: whether one is valid, and what it must be; views and flags are never None."""
