"""An explanation drawn: a figure of its images, and HTML for notebooks. It takes arrays and text, and imports no torch."""

import base64
import io
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from jaxtyping import Float
from markupsafe import Markup, escape
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from PIL import Image

from equicam.core.transforms import Transform
from equicam.drawing.plots import INK
from equicam.drawing.view_curve import curve_lines, curve_order, view_curve
from equicam.errors import EquicamError
from equicam.overlay import COLOURMAP, MAX_DEVIATION, RgbImage, overlay
from equicam.reasons import PEUM_NOTE

IMAGE_PX = 224  # the longer side of an image in a notebook
ROW_INCHES, IMAGE_INCHES, CURVE_INCHES = 2.75, 2.5, 3.2
DPI = 150
LETTERS_PER_IMAGE, LETTERS_PER_CURVE = 42, 48  # in a line of text above it
OWN_MAP = "the network's own map of one view"
SPREAD = "spread (standard deviation) of the views;\nits mean square is PEUM"


@dataclass(frozen=True)
class ImageDrawing:
    """One explained image as arrays and text."""

    title: str  # its class and confidence
    facts: tuple[str, ...]
    image: RgbImage | None  # None: not known
    overlay: RgbImage
    own: RgbImage | None  # the presented view's own map; None: of one view, or not among the views
    word: str  # steady, unsteady or cannot say
    peum: Float[np.ndarray, "H W"] | None  # None: of one view
    transforms: tuple[Transform, ...]
    correlations: tuple[float, ...]  # of each view's map with the presented view's


def draw_figure(drawings: Sequence[ImageDrawing], total: int) -> Figure:
    """A row for each image: it, its own map, the method's map, PEUM, and each view's correlation with the presented view."""
    if not drawings:
        raise EquicamError("a figure", "an image", "none", "images=1")
    first, several = drawings[0], drawings[0].peum is not None
    images = 1 + several + (first.image is not None) + (first.own is not None)
    widths = [IMAGE_INCHES] * images + [CURVE_INCHES] * several
    figure = Figure(figsize=(sum(widths), ROW_INCHES * len(drawings) + 0.3), layout="compressed", dpi=DPI)
    FigureCanvasAgg(figure)
    with rc_context({"font.size": 8}):
        rows = figure.subplots(len(drawings), len(widths), squeeze=False, width_ratios=widths)
        for row, one in zip(rows, drawings, strict=True):
            _draw_row(figure, list(row), one)
        if len(drawings) < total:
            figure.supxlabel(f"the first {len(drawings)} of {total:,} images", fontsize=8)
    return figure


def _draw_row(figure: Figure, cells: list[Axes], one: ImageDrawing) -> None:
    if one.image is not None:
        _draw_image(cells.pop(0), one.image, "image")
    if one.own is not None:
        _draw_image(cells.pop(0), one.own, f"{OWN_MAP}:\n{one.word}")
    axes = cells.pop(0)
    # a single view has no curve, above which the facts stand
    facts = [] if one.peum is not None else [_wrapped_facts(one, LETTERS_PER_IMAGE)]
    averaged = [] if one.own is None else [f"average of {len(one.transforms)} aligned views"]
    _draw_image(axes, one.overlay, "\n".join([one.title, *averaged, *facts]))
    # the colours of a map as they look over a grey image
    grey, ramp = np.full((1, 256, 3), 214, dtype=np.uint8), np.linspace(0, 1, 256)[None]
    _add_scale(figure, axes, ListedColormap(list(overlay(grey, ramp)[0] / 255)), 1.0, "saliency")
    if one.peum is None:
        return
    axes = cells.pop(0)
    deviation = np.sqrt(np.maximum(one.peum, 0))
    axes.imshow(deviation, cmap=COLOURMAP, vmin=0, vmax=MAX_DEVIATION)
    axes.set_axis_off()
    axes.set_title(f"{SPREAD}\n(per-image explanation uncertainty)", fontsize=8)
    _add_scale(figure, axes, colormaps[COLOURMAP], MAX_DEVIATION)
    _draw_curve(cells.pop(0), one)


def _draw_image(axes: Axes, image: RgbImage, title: str) -> None:
    axes.imshow(image, interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(title, fontsize=8, parse_math=False, wrap=True)


def _add_scale(figure: Figure, axes: Axes, colours: Colormap, top: float, label: str = "") -> None:
    bar = figure.colorbar(ScalarMappable(Normalize(0, top), colours), ax=axes, fraction=0.046, pad=0.03)
    bar.set_ticks([0, top])
    bar.set_label(label, fontsize=7, labelpad=-6)


def _draw_curve(axes: Axes, one: ImageDrawing) -> None:
    """The correlation of each view's map with the presented view's: over the angle where all views are rotations."""
    by_angle = all(view.is_rotation for view in one.transforms)
    points = curve_lines(one.transforms, one.correlations, by_angle=by_angle)[0]
    x, y = [point[0] for point in points], [point[1] for point in points]
    axes.plot(x, y, "o-", color=INK, markersize=3, linewidth=1)
    axes.set_ylim(min([0.0, *y]) - 0.05, 1.05)
    if by_angle:
        axes.set_xlim(0, 360)
        axes.set_xticks(range(0, 361, 90), [f"{angle}°" for angle in range(0, 361, 90)])
    axes.set_xlabel("angle of rotation (°)" if by_angle else "view")
    axes.set_ylabel("correlation with the\npresented view's map")
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_title(_wrapped_facts(one, LETTERS_PER_CURVE), fontsize=7, parse_math=False, loc="left")


def _wrapped_facts(one: ImageDrawing, letters: int) -> str:
    """In lines of at most so many letters."""
    return textwrap.fill("; ".join(one.facts), letters)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's name."""
    figure.savefig(path, dpi=DPI, bbox_inches="tight", pad_inches=0.08)


def show_figure(figure: Figure) -> None:
    """Show a figure: in a notebook's cell, or in a window that matplotlib opens."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and hasattr(shell, "kernel"):
        display = import_module("IPython.display")  # only there in a notebook
        display.display(display.Image(_png_of(figure)))
        return
    from matplotlib import pyplot

    if pyplot.get_backend().lower() == "agg":
        raise EquicamError("show", "a notebook or a display", "neither", 'save("explained.png")')
    window = pyplot.figure(figsize=figure.get_size_inches())
    window.figimage(np.asarray(Image.open(io.BytesIO(_png_of(figure, dpi=window.dpi)))))
    pyplot.show()


def _png_of(figure: Figure, *, dpi: float = DPI) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def draw_html(drawings: Sequence[ImageDrawing], total: int) -> str:
    """The images for a notebook: overlay, text and the views' correlations, without a file or a script."""
    cells, rest = Markup().join(map(_cell, drawings)), total - len(drawings)
    more = Markup("<p>… and {} more</p>").format(f"{rest:,}") if rest > 0 else ""
    note: Markup | str = ""
    if any(d.peum is not None for d in drawings):
        note = Markup("<p><small>{}.</small></p>").format(PEUM_NOTE.replace("'", "’"))
    grid = Markup('{}<div style="display:flex;flex-wrap:wrap;gap:16px">{}</div>{}')
    return str(grid.format(note, cells, more))


def _cell(one: ImageDrawing) -> Markup:
    named = (("image", one.image), (OWN_MAP, one.own), ("map", one.overlay))
    shown = [(name, image) for name, image in named if image is not None]
    image_tag, small = (
        Markup('<img src="{}" alt="{}" style="margin:0 4px 0 0">'),
        Markup("<br><small>{}</small>"),
    )
    images = Markup().join(image_tag.format(_data_url(image), name) for name, image in shown)
    order = small.format("; ".join(name for name, _ in shown)) if one.own is not None else ""
    curve = view_curve(one.transforms, one.correlations) if one.peum is not None else ""
    label = f"correlation with the presented view’s map, {curve_order(one.transforms)}"
    return Markup(
        '<figure style="margin:0;max-width:{}px"><figcaption><b>{}</b><br>{}</figcaption>{}{}<div style="max-width:320px">{}{}</div></figure>'
    ).format(
        len(shown) * (IMAGE_PX + 4), one.title, Markup("<br>").join(map(escape, one.facts)), images, order, curve,
        small.format(label) if curve else "",
    )  # fmt: skip


def _data_url(image: RgbImage) -> str:
    """An image as a PNG in a data URL, made smaller where it is large."""
    small = Image.fromarray(image)
    small.thumbnail((IMAGE_PX, IMAGE_PX))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
