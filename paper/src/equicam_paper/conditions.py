"""Does the map drift only where the prediction does? Eq by what happens to the prediction, and by its confidence."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter, itemgetter

from equicam.evaluate import summary
from equicam.evaluate.statistics import Estimate
from equicam.evaluate.summary import ConditionalEq
from equicam_paper.context import Context, Evaluation
from equicam_paper.plots import DRIFT, Scatter
from equicam_paper.rows import Both, Remark, Row, compare, correlation, not_run, number, scaled, with_verdict

METHODS = {"Grad-CAM": "grad-cam", "EquiGrad-CAM": "equigrad-cam"}
KINDS = {"unconditional": "all", "prediction-stable": "consistent", "confidence-weighted": "weighted"}
INTRODUCTION = "the introduction's is of the first 200 classes, its own table says 0.643"
OfMethods = dict[str, ConditionalEq]


def conditional(context: Context) -> Iterator[Row]:
    """All pairs, pairs that keep the top-1, pairs weighted by confidence."""
    methods = list(METHODS.values())
    tables = context.evaluate_both(methods)
    found = tables.map(lambda e: {m: summary.conditional(e.table, m, region=e.region) for m in methods})
    start = f"cond.{context.backbone}"
    for name, method in METHODS.items():
        for kind, field in KINDS.items():
            eq: Both[Estimate] = found.map(itemgetter(method)).map(attrgetter(field))
            yield compare(f"{start}.{name}.Eq {kind}", eq, label=f"{method}, {field}")
    kept = found.clean["grad-cam"].consistency_rate
    yield compare(f"{start}.stable_rate", Both(kept, None), label="the top-1 is kept")
    yield compare(f"{start}.flip_rate", Both(scaled(kept, -1, 1), None), label="the top-1 flips")
    if context.backbone == "resnet50":
        yield compare("cond.gap.resnet50.stable", tables.map(_paired_gap), label="gap, top-1 kept")
        first = context.on_first_classes(tables).clean
        kept = summary.conditional(first.table, "grad-cam", region=first.region).consistency_rate
        yield compare(
            "cond.intro.stable_rate", Both(kept, None), label="the top-1 is kept, first classes, as the introduction has it",
            reason=INTRODUCTION, of_first_classes=context.labelled,
        )  # fmt: skip
    why = Remark("one-network", {"network": context.backbone})
    for claim, label, value in (
        ("cond.max_move.eg", "most that conditioning moves equigrad-cam", _largest_move),
        ("cond.gap.lo", "least gap to grad-cam", lambda of: min(_gaps(of))),
        ("cond.gap.hi", "largest gap to grad-cam", lambda of: max(_gaps(of))),
    ):
        yield with_verdict(claim, found.map(value).map(number), "undecided", label=label, why=why)


def _paired_gap(found: Evaluation) -> Estimate:
    """Eq of EquiGrad-CAM minus that of Grad-CAM over the pairs that keep the top-1, paired."""
    several, one = (found.column("eq", method, each_angle=True) for method in ("equigrad-cam", "grad-cam"))
    consistent = summary.pick_prediction(found.table, "consistent", "grad-cam", each_angle=True)
    kept = consistent.at_pairs_of(one) == 1
    return summary.mean_of(replace(one, value=several.at_pairs_of(one) - one.value), kept)


def _gaps(of: OfMethods) -> list[float]:
    """Eq of EquiGrad-CAM minus that of Grad-CAM, over each kind of pairs."""
    eg, gc = ([getattr(of[m], kind).value for kind in KINDS.values()] for m in ("equigrad-cam", "grad-cam"))
    return [float(a - b) for a, b in zip(eg, gc, strict=True)]


def _largest_move(of: OfMethods) -> float:
    """How far conditioning moves the Eq of EquiGrad-CAM."""
    eg = of["equigrad-cam"]
    return max(abs(found.value - eg.all.value) for found in (eg.consistent, eg.weighted))


BINS = {"gc.lo": ("grad-cam", 0), "gc.hi": ("grad-cam", -1), "eg": ("equigrad-cam", -1)}
"""The method and bin of each claim."""
Bins = dict[str, list[tuple[str, Estimate]]]


def strata(context: Context) -> Iterator[Row]:
    """Eq in bins of the class probability; the paper's bin edges are not known, ours are fifths."""
    found = context.evaluate_both(list(METHODS.values()))
    first = context.on_first_classes(found).map(_bins)
    for claim, (method, i) in {f"cond.bins.{end}": of for end, of in BINS.items()}.items():
        (name, ours), (_, theirs) = first.clean[method][i], first.as_published[method][i]
        if ours.n and theirs.n:
            where = f"p in {name}" if method == "grad-cam" else "most confident bin"
            label, of_first = f"{method}, {where}, first classes", context.labelled
            yield compare(claim, Both(ours, theirs), label=label, of_first_classes=of_first)
        else:
            yield not_run(claim, f"no image has p in {name}: --data with more of them")
    bins = found.map(_bins)
    for method in METHODS.values():
        for (name, ours), (_, theirs) in zip(bins.clean[method], bins.as_published[method], strict=True):
            if ours.n:
                label = f"{method}, p in {name} (n = {ours.n})"
                yield compare("", Both(ours, theirs), label=label, published="plotted only")


def _bins(found: Evaluation) -> Bins:
    return {m: summary.by_confidence(found.table, m, region=found.region) for m in METHODS.values()}


NO_CHANGE = "as the authors compute it: with 1 − the probability of the rotated image, which is not a change"
NO_P = "seven pairs of one image are not independent: no p is given, the interval is by image"


def drift_confidence(context: Context) -> Iterator[Row]:
    """Pearson of 1 − Eq with the authors' quantity, the probability lost, and the log ratio; intervals by image."""
    tables = context.evaluate_both(["grad-cam"])
    found = tables.map(lambda e: summary.drift_and_confidence(e.table, "grad-cam", region=e.region))
    lost, ratio, theirs = (found.map(lambda of, i: correlation(of[i]), i) for i in range(3))
    yield compare("cond.corr.r", theirs, label="with 1 − the rotated image's probability", reason=NO_CHANGE)
    yield compare("cond.corr.var", theirs.map(_squared), label="variance explained", reason=NO_CHANGE)
    yield not_run("cond.corr.p", NO_P)
    yield compare("", lost, label="with the probability lost")
    yield compare("", ratio, label="with |log p ratio|")


def _squared(r: Estimate) -> Estimate:
    low, high = sorted((r.low**2, r.high**2))
    return Estimate(r.value**2, 0.0 if r.low < 0 < r.high else low, high, r.n, r.groups)


def scatter_confidence(context: Context) -> list[Scatter]:
    """Pairs that keep their top-1: drift against the probability lost, and the authors' quantity; pairs have no p."""
    found = context.evaluate(["grad-cam"])
    eq = found.column("eq", "grad-cam", each_angle=True)
    rotated, keeps = (
        summary.pick_prediction(found.table, name, "grad-cam", each_angle=True).at_pairs_of(eq)
        for name in ("confidence", "consistent")
    )
    presented = summary.pick_prediction(found.table, "presented-confidence", "grad-cam").by_id(eq.ids)
    lost, _, theirs = summary.drift_and_confidence(found.table, "grad-cam")
    kept = keeps == 1
    return [
        Scatter(title, label, DRIFT, x[kept], 1 - eq.value[kept], correlated)
        for title, label, x, correlated in (
            ("with the probability lost", "probability lost in the rotation", presented - rotated, lost),
            ("as the authors compute it", "1 − probability of the rotated image", 1 - rotated, theirs),
        )
    ]


MORE = {"drift-confidence": {"scatters": scatter_confidence}}
