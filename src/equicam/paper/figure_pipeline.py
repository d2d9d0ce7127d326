"""Figure pipeline: one picture, its views, their planes turned back, the mean and the map."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from PIL import Image

from equicam.core.views import Views
from equicam.explain import explain
from equicam.models.images import to_display_images
from equicam.paper.context import Bench, Experiment, Line
from equicam.paper.measure import pictures
from equicam.report.explanation_files import MOST_SPREAD
from equicam.report.overlay import Picture, heat, overlay, panel

VIEWS = 6
A_FEW = 16


def run(bench: Bench) -> Iterator[Line]:
    """The surest of a few pictures through EquiGrad-CAM with six views."""
    x = pictures(bench, A_FEW)
    found = explain(bench.model, x, views=VIEWS)
    alive = [not flags & {"blank", "constant"} for flags in found.flags]
    i = max(range(len(x)), key=lambda i: (alive[i], float(found.sure[i])))
    views = Views(found.angles)
    planes = found.planes[i][:, None]
    scale = float(planes.max()) or 1.0
    turned, aligned = (
        (v[:, 0] / scale).double().cpu().numpy() for v in (planes, views.undo(planes, "reflect"))
    )
    mean = (found.plane[i] / (float(found.plane[i].max()) or 1.0)).double().cpu().numpy()

    def drawn(plane: Float[np.ndarray, "h w"]) -> Picture:
        cells = Image.fromarray(heat(np.clip(plane, 0, 1)))
        return np.asarray(cells.resize((x.shape[-1], x.shape[-2]), Image.Resampling.NEAREST))

    shown = to_display_images(bench.model, views.act(x[i : i + 1])[:, 0])
    picture = to_display_images(bench.model, x[i : i + 1])[0]
    final = overlay(picture, found.map[i].double().cpu().numpy())
    apart = overlay(picture, np.sqrt(found.peum[i].double().cpu().numpy()) / MOST_SPREAD)
    last = [("EquiGrad-CAM", final), ("views disagree", apart), ("averaged", drawn(mean))]
    rows = [
        [(f"turned {a:g}°", p) for a, p in zip(found.angles, shown, strict=True)],
        [("its own map", drawn(p)) for p in turned],
        [("turned back", drawn(p)) for p in aligned],
    ]
    bench.out.mkdir(parents=True, exist_ok=True)
    path = bench.out / "pipeline.png"
    panel([[*row, end] for row, end in zip(rows, last, strict=True)], path, inches=1.5)
    yield Line("", "figure", "figure", None, None, "measured", f"drawn: {path}")


EXPERIMENT = Experiment(
    "Figure pipeline: from views to a map", (), run, needs="a classifier and a few pictures"
)
