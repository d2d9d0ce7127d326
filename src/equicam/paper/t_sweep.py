"""How many views: Eq against T, and the dip at T = 4."""

from collections.abc import Iterator

from equicam.evaluation.statistics import Estimate
from equicam.methods import find
from equicam.paper.context import Bench, Experiment, Line, beside, claims, eq, line, number, others

VIEWS = (2, 3, 4, 6, 9, 12, 18, 36)


def run(bench: Bench) -> Iterator[Line]:
    """Eq at each T by both protocols; T = 4 against T = 3 is where they disagree."""
    found: dict[bool, dict[int, Estimate]] = {}
    base: dict[bool, Estimate] = {}
    for published in (True, False):
        # every T up to 18 is a part of the 36 views, so that all are read at once
        methods = {f"T = {t}": find("equigrad-cam", views=t, as_published=published) for t in VIEWS}
        rows = bench.rows(methods | {"grad-cam": find("grad-cam")}, as_published=published)
        found[published] = {t: eq(rows, f"T = {t}", as_published=published) for t in VIEWS}
        base[published] = eq(rows, "grad-cam", as_published=published)
    dips = {p: found[p][3].value > found[p][4].value for p in (True, False)}
    artefact = (
        "with zero filling T = 4 falls below T = 3; in the disc it does not"
        if dips[True] and not dips[False]
        else ""
    )
    done = []
    for t in VIEWS:
        for name in (f"tsweep.{bench.backbone}.T{t}", f"tsweep.{bench.backbone}.T{t}.derived"):
            if name in claims():
                why = artefact if t == 4 else ""
                done.append(
                    line(
                        name,
                        clean=found[False][t],
                        as_published=found[True][t],
                        what=f"T = {t}",
                        artefact=why,
                    )
                )
        if not any(d.claim.split(".")[2:3] == [f"T{t}"] for d in done):
            done.append(Line("", f"T = {t}", "not in the paper", found[False][t], found[True][t], "measured"))
        name = f"tsweep.{bench.backbone}.frac.T{t}"
        if name in claims():
            shares = [
                number((found[p][t].value - base[p].value) / (found[p][18].value - base[p].value))
                for p in (False, True)
            ]
            done.append(
                line(
                    name,
                    clean=shares[0],
                    as_published=shares[1],
                    what=f"share of the gain at T = {t}",
                    tolerance=0.06,
                )
            )
    for before, t in ((6, 9), (9, 12), (12, 18)):
        name = f"tsweep.{bench.backbone}.add.T{t}"
        points = [
            number(100 * (found[p][t].value - found[p][before].value) / (found[p][18].value - base[p].value))
            for p in (False, True)
        ]
        what = f"points of the gain that T = {t} adds to T = {before}"
        done.append(beside(name, clean=points[0], as_published=points[1], what=what, tolerance=1.5))
    name = f"tsweep.{bench.backbone}.base.derived"
    done.append(beside(name, clean=base[False], as_published=base[True], what="grad-cam"))
    yield from done
    yield from others("tsweep.", done, bench)


EXPERIMENT = Experiment("T sweep: how many views", ("tsweep.",), run)
