"""Figures of images: rows with letters and names, and a colour bar for every scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from equicam.overlay import COLOURMAP, RgbImage, heat
from equicam_paper.plots import STYLE, save_figure
from equicam_paper.rows import Row, note


@dataclass(frozen=True)
class ImageRow:
    """Images with their titles; `scale` is what the colours mean, and the value of the brightest."""

    name: str
    images: Sequence[tuple[str, RgbImage]]
    scale: tuple[str, float] | None = None


def write_images(rows: Sequence[ImageRow], title: str, stem: Path, *, inches: int | float = 1.5) -> Row:
    """Write rows of images as PDF, SVG and PNG; the row of the result names the PNG."""
    columns = max(len(row.images) for row in rows)
    stem.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(
            figsize=(inches * columns + 1.2, (inches + 0.45) * len(rows) + 0.5), layout="constrained"
        )
        FigureCanvasAgg(figure)
        for i, (row, strip) in enumerate(
            zip(rows, figure.subfigures(len(rows), 1, squeeze=False)[:, 0], strict=True)
        ):
            strip.suptitle(
                f"({chr(ord('a') + i)}) {row.name}", fontsize=9, x=0.01, ha="left", parse_math=False
            )
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
        png = next(path for path in save_figure(figure, stem) if path.suffix == ".png")
    return Row("", "figure", "figure", None, None, "measured", note(f"written: {png}"))


def cells_image(plane: Float[Tensor, "h w"], size: tuple[int, int]) -> RgbImage:
    """A map from 0 to 1 at layer resolution, its cells visible."""
    cells = Image.fromarray(heat(np.clip(plane.double().cpu().numpy(), 0, 1)))
    return np.asarray(cells.resize(size, Image.Resampling.NEAREST))
