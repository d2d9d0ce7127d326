"""Figure drift strip: one picture at five angles, Grad-CAM above, EquiGrad-CAM below."""

from collections.abc import Iterator

from equicam.core.views import Views
from equicam.explain import explain
from equicam.models.images import to_display_images
from equicam.paper.context import Bench, Experiment, Line
from equicam.paper.measure import pictures
from equicam.report.overlay import overlay, panel

ANGLES = (0, 45, 90, 135, 180)
A_FEW = 64


def run(bench: Bench) -> Iterator[Line]:
    """The least certain picture that keeps its class in every view; each map is of the turned picture."""
    x = pictures(bench, A_FEW)
    found = explain(bench.model, x)
    i = min(range(len(x)), key=lambda i: (int(found.flips[i].sum()), float(found.sure[i])))
    turned = Views(ANGLES).act(x[i : i + 1])[:, 0]
    shown = to_display_images(bench.model, turned)
    rows = [[(f"turned {a}°", p) for a, p in zip(ANGLES, shown, strict=True)]]
    for method, name in (("grad-cam", "Grad-CAM"), ("equigrad-cam", "EquiGrad-CAM")):
        maps = (
            explain(bench.model, turned, method=method, target=int(found.target[i]))
            .map.double()
            .cpu()
            .numpy()
        )
        rows.append([(f"{name}, {a}°", overlay(p, m)) for a, p, m in zip(ANGLES, shown, maps, strict=True)])
    bench.out.mkdir(parents=True, exist_ok=True)
    path = bench.out / "drift-strip.png"
    panel(rows, path, inches=1.9)
    yield Line("", "figure", "figure", None, None, "measured", f"drawn: {path}")


EXPERIMENT = Experiment(
    "Figure drift strip: maps of one picture at five angles", (), run, needs="a classifier and a few pictures"
)
