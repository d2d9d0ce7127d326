"""The causal test: does the model use the pixels whose saliency moves?"""

from collections.abc import Iterator

from equicam.experiments.experiment import Bench, Experiment, Line, beside, claims, line, number, others
from equicam.scores import summary

REGIONS = {"drift": "drift", "agreement": "agreement", "random": "scattered"}


def run(bench: Bench) -> Iterator[Line]:
    """Drift, agreement and random regions; then, inside the disc, regions of the same shape and saliency."""
    found = {}
    for published in (True, False):
        rows = bench.rows(["grad-cam"], ["causal"], as_published=published)
        found[published] = {
            o.region: o for o in summary.occluded(rows, "grad-cam", region="full" if published else "disc")
        }
    shape = found[False]["drift-elsewhere"].drift_above
    survives = shape is not None and shape.high < 0
    why = "" if survives else "inside the disc the drift region costs more than the same shape elsewhere"
    done = []
    for words, region in REGIONS.items():
        for frame, side in (("d0", "presented"), ("dtheta", "turned")):
            name = f"causal.{bench.backbone}.{words}.{frame}"
            done.append(beside(
                name, clean=getattr(found[False][region], side), as_published=getattr(found[True][region], side),
                what=f"{region}, {side}", artefact=why if words == "drift" else "",
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
    yield from done
    for region, one in found[False].items():
        if one.drift_above is not None:
            above = one.drift_above
            text = f"drift costs {above.mean:+.3f} [{above.low:+.3f}, {above.high:+.3f}] more, on {above.wins:.0%} of the pictures"
            yield Line("", f"{region} (control)", "not in the paper", one.presented, None, "measured", text)
    yield from others("causal.", done, bench)


EXPERIMENT = Experiment("Causal test: is the drift where the model looks?", ("causal.",), run)
