"""What `explain` returns: tensors by image, a line of text for each, and drawings of them on request."""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from equicam import __version__
from equicam.core.transforms import presented_index
from equicam.core.views import Views
from equicam.errors import EquicamError
from equicam.models.images import denormalise
from equicam.models.weights import UNREADABLE
from equicam.readers.classes import Task
from equicam.steadiness import Steadiness, judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from equicam.report.explanation_drawing import ImageDrawing

MAX_LINES = 32
"""Images that are printed."""
MAX_IN_NOTEBOOK = 16
"""Images that a notebook shows."""
MAX_PLOTTED = 8
"""Rows of a figure, unless the caller wants more."""
FIGURE_FILES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
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
    peum: Float[Tensor, "b H W"]  # variance of the views' aligned maps
    peum_score: Float[Tensor, " b"]  # mean of peum
    stability: Float[
        Tensor, " b"
    ]  # mean Pearson of the presented view's own map with every other's, aligned; NaN for one view
    stability_by_view: Float[Tensor, "b t"]  # the same for each view; NaN where the view was not used
    disagreement: Float[Tensor, " b"]  # 1 − mean Pearson over all pairs of views; NaN for one view
    target: Int[Tensor, " b"]  # the class explained
    confidence: Float[Tensor, " b"]  # its probability in the presented image; NaN where a value is explained
    view_confidence: Float[Tensor, "b t"]  # its probability in each view; NaN where the view was not used
    view_top1: Int[
        Tensor, "b t"
    ]  # each view's most probable class (of labels: the target where the view has it); −1 where the view was not used
    view_flips: Bool[Tensor, "b t"]  # views whose top-1 is not the presented image's
    view_kept: Bool[Tensor, "b t"]  # views the weigher kept
    view_used: Bool[Tensor, "b t"]  # views that were read: all, except with views="auto"
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

    def __len__(self) -> int:
        return len(self.target)

    @cached_property
    def steadiness(self) -> tuple[Steadiness, ...]:
        """Of each image: steady, unsteady or cannot say, with the reason that matters most."""
        rows = zip(self.stability_by_view.tolist(), self.view_top1.tolist(), self.flags, strict=True)
        presented = presented_index(self.views.transforms)
        return tuple(judge(values, top1, self.views.labels, flags, presented) for values, top1, flags in rows)

    def __getitem__(self, index: Any) -> "Explanation":
        """Some of the images: by number, slice, list of numbers or mask."""
        if isinstance(index, slice):
            rows = list(range(len(self)))[index]
        elif isinstance(index, Tensor | np.ndarray | list | tuple):
            found = torch.as_tensor(index)
            is_mask = found.dtype == torch.bool
            if is_mask and found.shape != (len(self),):
                raise IndexError(f"a mask of {len(self)} images, got {tuple(found.shape)}")
            chosen = found.nonzero().flatten() if is_mask else found.flatten()
            rows = [range(len(self))[i] for i in chosen.tolist()]
        else:
            rows = [range(len(self))[operator.index(index)]]
        at = torch.tensor(rows, dtype=torch.long, device=self.target.device)
        some: dict[str, Any] = {name: value[at.to(value.device)] for name, value in self._tensors().items()}
        return replace(self, **some, flags=tuple(self.flags[i] for i in rows))

    def __iter__(self) -> Iterator["Explanation"]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        several = f"{len(self.views)} views" if len(self.views) > 1 else "one view"
        head = f"Explanation of {len(self)} image{'' if len(self) == 1 else 's'}, {several}"
        head += "" if self.layer is None else f", layer {self.layer!r}"
        lines = [f"  {i}  {'; '.join(facts)}" for i, facts in enumerate(describe_images(self[:MAX_LINES]))]
        rest = len(self) - MAX_LINES
        return "\n".join([head, *lines, *([f"  … and {rest:,} more"] if rest > 0 else [])])

    def cpu(self) -> "Explanation":
        """The same on the CPU."""
        moved: dict[str, Any] = {name: value.cpu() for name, value in self._tensors().items()}
        return replace(self, **moved)

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Every tensor as an array, by name."""
        return {name: value.detach().cpu().numpy() for name, value in self._tensors().items()}

    def overlay(self) -> UInt8[np.ndarray, "b H W 3"]:
        """The maps as colours over the images, 8-bit RGB; `PIL.Image.fromarray(e.overlay()[0])` is an image."""
        from equicam.report.overlay import overlay

        maps = self.map.detach().float().cpu().numpy()
        found = self._images()
        if found is None:
            found = np.full((*maps.shape, 3), UNKNOWN_IMAGE_GREY, dtype=np.uint8)
        for i, values in enumerate(maps):
            found[i] = overlay(found[i], values)
        return found

    def plot(self, *, images: int = MAX_PLOTTED) -> "Figure":
        """A figure of the first images, a row each: image, map, PEUM, and stability over the views."""
        from equicam.report.explanation_drawing import draw_figure

        return draw_figure(self._drawings(images), len(self))

    def show(self, *, images: int = MAX_PLOTTED) -> None:
        """Show the figure: in a notebook's cell, or in a window."""
        from equicam.report.explanation_drawing import show_figure

        show_figure(self.plot(images=images))

    def save(self, path: str | Path) -> Path:
        """Write a figure (`.png`, `.jpg`, `.pdf`, `.svg`), the tensors (`.pt`, for `Explanation.load`), or a folder of both.

        A folder gets an overlay and a figure for each image, and `explanation.pt`.
        """
        from equicam.report.explanation_drawing import write_figure, write_image

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
                "save", needs=f"a folder, or a file that ends in {', '.join((*FIGURE_FILES, *TENSOR_FILES))}",
                got=repr(path.name), fix='"explained.png"',
            )  # fmt: skip
        else:
            path.mkdir(parents=True, exist_ok=True)
            digits = len(str(max(0, len(self) - 1)))
            for i, one in enumerate(self):
                write_image(one.overlay()[0], path / f"{i:0{digits}d}.overlay.png")
                write_figure(one.plot(), path / f"{i:0{digits}d}.png")
            torch.save(self.state(), path / "explanation.pt")
        return path

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, which `torch.save` writes and `torch.load(…, weights_only=True)` reads."""
        # cloned, because torch writes the whole storage behind a slice
        tensors = {name: value.detach().cpu().clone() for name, value in self._tensors().items()}
        plain = {name: getattr(self, name) for name in ("layer", "mean", "std", "classes", "task")}
        flags, views = [sorted(one) for one in self.flags], list(self.views.to_plain())
        return {"equicam": __version__, "views": views, "flags": flags, **plain, **tensors}

    @staticmethod
    def load(path: str | Path) -> "Explanation":
        """An explanation that `save` wrote; no code in the file is run."""
        try:
            return _from_state(torch.load(path, map_location="cpu", weights_only=True))
        except (*UNREADABLE, OSError) as error:
            raise EquicamError(
                f"the explanation {str(path)!r}", needs="a file that Explanation.save wrote", got=type(error).__name__,
                fix='e.save("explanation.pt")',
            ) from error  # fmt: skip

    def _tensors(self) -> dict[str, Tensor]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _images(self) -> UInt8[np.ndarray, "b H W 3"] | None:
        """The model's input as 8-bit RGB, its normalisation inverted; None where it is not known."""
        return None if self.inputs is None else denormalise(self.inputs, self.mean, self.std)

    def _drawings(self, count: int) -> "list[ImageDrawing]":
        """The first images as arrays and text."""
        from equicam.report.explanation_drawing import ImageDrawing

        some, several = self[:count], len(self.views) > 1
        images, overlays, arrays = some._images(), some.overlay(), some.to_numpy()
        return [
            ImageDrawing(
                title=title,
                facts=tuple(facts),
                image=None if images is None else images[i],
                overlay=overlays[i],
                peum=arrays["peum"][i] if several else None,
                transforms=self.views.transforms,
                correlations=tuple(arrays["stability_by_view"][i].tolist()),
            )
            for i, (title, *facts) in enumerate(describe_images(some))
        ]

    def _repr_html_(self) -> str:
        from equicam.report.explanation_drawing import draw_html

        return draw_html(self._drawings(MAX_IN_NOTEBOOK), len(self))


def describe_images(e: Explanation) -> list[list[str]]:
    """What is printed of each image: class and confidence first, then steadiness, PEUM, flips and flags."""
    outputs = [math.nan] * len(e) if e.output is None else e.output.tolist()
    explained = zip(e.target.tolist(), e.confidence.tolist(), outputs, strict=True)
    found = [[_title(e, *one)] for one in explained]
    flips, used = e.view_flips.sum(1).tolist(), e.view_used.sum(1).tolist()
    if len(e.views) > 1:
        for facts, steadiness, score in zip(found, e.steadiness, e.peum_score.tolist(), strict=True):
            facts += [str(steadiness), f"PEUM {score:.4f}"]
    for i, facts in enumerate(found):
        known = len(e.views) > 1 and e.steadiness[i].reason.code == "prediction-changes"
        facts += [f"{flips[i]} of {used[i]} views flip"] if flips[i] and not known else []
        flags = sorted(e.flags[i] - {"flipped"})  # the line before says it
        facts += [f"flags {', '.join(flags)}"] if flags else []
    return found


def _title(e: Explanation, target: int, confidence: float, output: float) -> str:
    """The class and its confidence, or what is explained and its value."""
    value = e.task == "regression"
    name = "value" if value and target == 0 else f"output {target}" if value else f"class {target}"
    if e.classes is not None and 0 <= target < len(e.classes):
        name = "".join(letter if letter.isprintable() else "�" for letter in e.classes[target])
    if not math.isnan(confidence):
        return f"{name} (p = {confidence:.2f})"
    return name if math.isnan(output) else f"{name} = {output:.4g}"


def _from_state(found: Any) -> Explanation:
    """The explanation of a state, checked: anybody may have written the file."""
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError("no state of an explanation")
    names = {f.name for f in fields(Explanation)}
    given: dict[str, Any] = {key: value for key, value in found.items() if key in names}
    tensors: dict[str, Any] = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    flags = tuple(frozenset(map(str, one)) for one in given["flags"])
    if any(len(value) != len(flags) for value in tensors.values()):
        raise ValueError("tensors of other numbers of images")
    plain: dict[str, Any] = {key: given.get(key) for key in ("layer", "task")}
    plain |= {
        key: None if given.get(key) is None else tuple(given[key]) for key in ("mean", "std", "classes")
    }
    views = Views([tuple(one) if isinstance(one, list) else one for one in given["views"]])
    return Explanation(**tensors, **plain, flags=flags, views=views)
