"""Eq by angle."""

from collections.abc import Iterator

from equicam.evaluation import summary
from equicam.paper.context import Bench, Experiment, Line, claims, line, others


def run(bench: Bench) -> Iterator[Line]:
    """Grad-CAM and EquiGrad-CAM at every evaluation angle; the paper names 135°."""
    methods = {"Grad-CAM": "grad-cam", "EquiGrad-CAM": "equigrad-cam"}
    tables = {p: bench.rows(list(methods.values()), as_published=p) for p in (True, False)}
    done = []
    for words, method in methods.items():
        by = {p: dict(summary.by_angle(t, method, region="full" if p else "disc")) for p, t in tables.items()}
        for angle in by[False]:
            name = f"angle135.{bench.backbone}.{words}"
            what = f"{method} at {angle:g}°"
            if angle == 135 and name in claims():
                done.append(line(name, clean=by[False][angle], as_published=by[True][angle], what=what))
            else:
                done.append(Line("", what, "drawn only", by[False][angle], by[True][angle], "measured"))
    yield from done
    yield from others("angle135.", done, bench)


EXPERIMENT = Experiment("Eq by angle", ("angle135.",), run)
