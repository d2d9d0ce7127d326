"""The paper's figures of images and of the network's response: one image, its views, their maps, and Eq by confidence."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from equicam.core.views import Views
from equicam.explain import explain
from equicam.models.images import denormalise
from equicam.overlay import COLOURMAP, MAX_DEVIATION, RgbImage, heat, overlay
from equicam_paper import EXPERIMENTS, plots
from equicam_paper.causal import decomposition
from equicam_paper.conditions import strata
from equicam_paper.context import Context
from equicam_paper.rows import Both, Row, compare, note, number


@dataclass(frozen=True)
class ImageRow:
    """Images with their titles; `scale` is what the colours mean, and the value of the brightest."""

    name: str
    images: Sequence[tuple[str, RgbImage]]
    scale: tuple[str, float] | None = None


def write_images(rows: Sequence[ImageRow], title: str, stem: Path, *, inches: int | float) -> Row:
    """Write rows of images as PDF, SVG and PNG; the row of the result names the PNG."""
    columns = max(len(row.images) for row in rows)
    stem.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(plots.STYLE):
        size = inches * columns + 1.2, (inches + 0.45) * len(rows) + 0.5
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        strips = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
        for letter, row, strip in zip("abcdefgh", rows, strips, strict=False):
            strip.suptitle(f"({letter}) {row.name}", fontsize=9, x=0.01, ha="left", parse_math=False)
            cells = strip.subplots(1, columns, squeeze=False)[0]
            for cell in cells:
                cell.axis("off")
            for cell, (name, image) in zip(cells, row.images, strict=False):
                cell.imshow(image, interpolation="nearest")
                cell.set_title(name, fontsize=8, loc="center", parse_math=False)
            colours = ScalarMappable(Normalize(0, row.scale[1] if row.scale else 1), COLOURMAP)
            bar = strip.colorbar(
                colours, ax=list(cells), label=row.scale[0] if row.scale else " ", shrink=0.95, aspect=14, pad=0.01, format="%.2f"
            )  # fmt: skip
            if row.scale is None:  # a transparent one keeps the columns in line
                bar.solids.set_alpha(0)
                bar.outline.set_visible(False)
                bar.ax.tick_params(colors="none")
        figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
        return written(plots.save_figure(figure, stem))


def written(paths: Sequence[Path]) -> Row:
    """The row of a figure, which names its PNG."""
    png = next(path for path in paths if path.suffix == ".png")
    return Row("", "figure", "figure", None, None, "measured", note(f"written: {png}"))


ANGLES = (0, 45, 90, 135, 180)
IMAGES_OF_STRIP, IMAGES_OF_PIPELINE = 64, 16


def figure_drift_strip(context: Context) -> Iterator[Row]:
    """Maps of one rotated image, Grad-CAM in the rotated frame, EquiGrad-CAM in that of the presented one.

    The last row, which the paper does not have, shows Grad-CAM in the frame of EquiGrad-CAM, where the two can be compared.
    """
    x = context.open_some(IMAGES_OF_STRIP)
    found = explain(context.model, x)
    i = _typical(found.stability, found.view_flips)
    views = Views(ANGLES)
    rotated = views.act(x[i : i + 1])[:, 0]
    presented = denormalise(x[i : i + 1], context.model.mean, context.model.std)[0]
    images = denormalise(rotated, context.model.mean, context.model.std)
    how: dict[str, Any] = {"target": int(found.target[i])}
    both = ("grad-cam", "equigrad-cam")
    maps = {m: explain(context.model, rotated, method=m, **how).map.double() for m in both}
    back = {method: views.align(of[:, None], "reflect")[:, 0].clamp(0, 1) for method, of in maps.items()}

    def canonical(method: str) -> list[tuple[str, RgbImage]]:
        aligned = zip(ANGLES, back[method], correlations(back[method]), strict=True)
        return [(f"{a}°: r = {r:.2f}", overlay(presented, m.cpu().numpy())) for a, m, r in aligned]

    own = [overlay(p, m.cpu().numpy()) for p, m in zip(images, maps["grad-cam"], strict=True)]
    names, scale = [f"{angle}°" for angle in ANGLES], ("map", 1.0)
    rows = [
        ImageRow("the rotated images", list(zip(names, images, strict=True))),
        ImageRow("Grad-CAM, in the rotated frame", list(zip(names, own, strict=True)), scale),
        ImageRow("EquiGrad-CAM, rotated back to the presented frame; r with the map at 0°, in the disc", canonical("equigrad-cam"), scale),
        ImageRow("Grad-CAM, rotated back as well (not in the paper's figure)", canonical("grad-cam"), scale),
    ]  # fmt: skip
    stem = context.out / "figure-drift-strip"
    yield write_images(rows, "Maps of one image at five angles", stem, inches=1.6)
    for method, aligned in back.items():
        for angle, r in zip(ANGLES[1:], correlations(aligned)[1:], strict=True):
            yield from _known(r, f"{method} at {angle}°: r with the map at 0°, in the disc")


def _typical(stability: Float[Tensor, " b"], flips: Float[Tensor, "b t"] | Tensor) -> int:
    """The image of median stability among those with the fewest flipped views."""
    flipped = flips.sum(1)
    kept = (flipped == flipped.min()).nonzero()[:, 0]
    order = kept[stability[kept].nan_to_num(-1.0).argsort()]
    return int(order[len(order) // 2])


def correlations(maps: Float[Tensor, "t H W"]) -> list[float]:
    """Pearson of every map with the first, inside the inscribed disc."""
    side = maps.shape[-1]
    at = torch.arange(side, device=maps.device) - (side - 1) / 2
    disc = (at[:, None] ** 2 + at**2) <= (side / 2) ** 2
    inside = maps[:, disc]
    return [float(torch.corrcoef(torch.stack((inside[0], one)))[0, 1]) for one in inside]


def _known(value: float, label: str) -> Iterator[Row]:
    """A row without an interval, where there is a value."""
    if not math.isnan(value):
        yield compare("", Both(number(value, 1), None), label=label)


def figure_pipeline(context: Context) -> Iterator[Row]:
    """The most confident of a few images through EquiGrad-CAM with six views; views and their mean share a scale."""
    x = context.open_some(IMAGES_OF_PIPELINE)
    found = explain(context.model, x, views=6)
    alive = [not flags & {"blank", "constant"} for flags in found.flags]
    i = max(range(len(x)), key=lambda i: (alive[i], float(found.confidence[i])))
    views, own = found.views, found.view_maps[i][:, None]
    aligned = views.align(own, "reflect")[:, 0]
    brightest = float(own.max()) or 1.0

    def cells(plane: Float[Tensor, "h w"]) -> RgbImage:
        """A map at layer resolution, its cells visible."""
        colours = Image.fromarray(heat(np.clip((plane / brightest).double().cpu().numpy(), 0, 1)))
        return np.asarray(colours.resize((x.shape[-1], x.shape[-2]), Image.Resampling.NEAREST))

    rotated = denormalise(views.act(x[i : i + 1])[:, 0], context.model.mean, context.model.std)
    image = denormalise(x[i : i + 1], context.model.mean, context.model.std)[0]
    spread = found.peum[i].double().sqrt().cpu().numpy()
    whole = overlay(image, found.map[i].double().cpu().numpy())
    activation = ("weighted activation", brightest)
    means = [*zip(views.labels, map(cells, aligned), strict=True), ("mean", cells(aligned.mean(0)))]
    rows = [
        ImageRow("rotate: the views", list(zip(views.labels, rotated, strict=True))),
        ImageRow("the map of each view, in its own frame", [("", cells(plane)) for plane in own[:, 0]], activation),
        ImageRow("align: the same maps in the frame of the presented image, and their mean", means, activation),
        ImageRow("EquiGrad-CAM", [("presented image", image), ("map", whole)], ("map", 1.0)),
        ImageRow(
            "where the views disagree: the root of PEUM", [("", overlay(image, spread / MAX_DEVIATION))],
            ("standard deviation", MAX_DEVIATION),
        ),
    ]  # fmt: skip
    yield write_images(rows, "From views to a map", context.out / "figure-pipeline", inches=1.3)
    confidence = found.view_confidence[i].tolist()
    for label, p, r in zip(views.labels, confidence, correlations(aligned), strict=True):
        yield compare("", Both(number(p, 1), None), label=f"view {label}: confidence")
        yield from _known(r, f"view {label}: r of its aligned map with that of the presented image")


PLOTTED_LABELS = r".+ \(n = \d+\)|(feature|logit), .+"
"""Labels of the rows that both panels of signal and noise show."""


def figure_signal_noise(context: Context) -> Iterator[Row]:
    """(a) Eq by confidence; (b) how similar pooled features and logits stay under rotation, next to those of unrelated images."""
    bins, stages = list(strata(context)), list(decomposition(context))
    (by_confidence,) = plots.strata(bins)
    _, cosines = plots.bars(stages, *EXPERIMENTS["decomposition"]["panels"])
    context.out.mkdir(parents=True, exist_ok=True)
    title = f"Drift and the network's response\n{context.backbone}, n = {len(context.sample):,}"
    with rc_context(plots.STYLE):
        figure = plots.compose([by_confidence, cosines], title)
        yield written(plots.save_figure(figure, context.out / "figure-signal-noise"))
    for row in (*bins, *stages):  # `strata` and `decomposition` answer the claims
        if re.fullmatch(PLOTTED_LABELS, row.label) and row.verdict != "not run":
            yield row.unclaimed()
