"""The causal test: does the model use the pixels whose saliency moves?"""

import math
from collections.abc import Iterator

import numpy as np

from equicam.evaluation import statistics, summary
from equicam.paper.context import Bench, Experiment, Line, beside, claims, line, number, others
from equicam.paper.measure import region

SOFT = "a turned random mask is soft, so that its two drops differ by construction"
REGIONS = {"drift": "drift", "agreement": "agreement", "random": "scattered"}


def run(bench: Bench) -> Iterator[Line]:
    """Drift, agreement and random regions; then, inside the disc, regions of the same shape and saliency."""
    found = {}
    for published in (True, False):
        rows = bench.rows(["grad-cam"], ["causal"], as_published=published)
        found[published] = {
            o.region: o for o in summary.occlusion_effects(rows, "grad-cam", region="full" if published else "disc")
        }
    shape = found[False]["drift-elsewhere"].drift_above
    more = shape is not None and shape.low > 0
    why = "inside the disc the drift region costs more than the same shape elsewhere" if more else ""
    done = []
    for words, mine in REGIONS.items():
        for frame, side in (("d0", "presented"), ("dtheta", "turned")):
            name = f"causal.{bench.backbone}.{words}.{frame}"
            done.append(beside(
                name, clean=getattr(found[False][mine], side), as_published=getattr(found[True][mine], side),
                what=f"{mine}, {side}", artefact=why if words == "drift" else "",
            ))  # fmt: skip
    name = f"causal.{bench.backbone}.ratio"
    if name in claims():
        ratios = [
            number(found[p]["agreement"].presented.value / found[p]["drift"].presented.value)
            for p in (False, True)
        ]
        done.append(
            line(name, clean=ratios[0], as_published=ratios[1], what="agreement over drift", tolerance=0.5)
        )
    if f"causal.{bench.backbone}.p" in claims():
        done += _asymmetry(bench)
    yield from done
    for mine, one in found[False].items():
        if one.drift_above is not None:
            above = one.drift_above
            text = f"drift minus this {above.mean:+.3f} [{above.low:+.3f}, {above.high:+.3f}]; drift costs more on {above.wins:.0%} of the pictures"
            yield Line("", f"{mine} (control)", "not in the paper", one.presented, None, "measured", text)
    yield from others("causal.", done, bench)


def _asymmetry(bench: Bench) -> list[Line]:
    """|d₀ − d_θ| of the drift and of the random region, and whether the first is larger, over pairs as the paper does."""
    start, apart = f"causal.{bench.backbone}", {}
    for published in (True, False):
        rows, where = bench.rows(["grad-cam"], ["causal"], as_published=published), region(published)
        for words, name in (("drift", "drift"), ("random", "scattered")):
            here, there = (
                summary.pick(rows, f"causal-{name}{end}", "grad-cam", where, each_angle=True)
                for end in ("", "-rotated")
            )
            apart[published, words] = np.abs(here.value - there.value), here.ids
    made = []
    for words in ("drift", "random"):
        ours, theirs = (
            statistics.bootstrap(statistics.mean, apart[p, words][0], cluster=apart[p, words][1])
            for p in (False, True)
        )
        made.append(
            line(
                f"{start}.{words}.asym",
                clean=ours,
                as_published=theirs,
                what=f"asymmetry, {words}",
                reason=SOFT,
            )
        )
    against = {p: statistics.compare(apart[p, "drift"][0], apart[p, "random"][0]) for p in (True, False)}
    what = "log10 p that drift is more asymmetric than random"
    said = "its pairs are seven of each picture and not independent; one-sided"
    ps = [number(against[p].log10_p, against[p].n) for p in (False, True)]
    verdict = "matches" if against[True].log10_p > math.log10(0.5) else "differs"
    made.append(Line(f"{start}.p", what, "p = 1", ps[0], ps[1], verdict, said))
    medians = [
        number(float(np.nanmedian(apart[p, "drift"][0] - apart[p, "random"][0]))) for p in (False, True)
    ]
    made.append(
        line(
            f"{start}.median_diff",
            clean=medians[0],
            as_published=medians[1],
            what="median of drift − random, asymmetry",
        )
    )
    return made


EXPERIMENT = Experiment("Causal test: is the drift where the model looks?", ("causal.",), run)
