"""The conditional table: does the map drift only where the prediction does?"""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter, itemgetter

from equicam.evaluate import summary
from equicam.evaluate.statistics import Estimate
from equicam.evaluate.summary import ConditionalEq
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Remark, Row, compare, number, with_verdict

KINDS = {
    "Eq unconditional": "all",
    "Eq prediction-stable": "consistent",
    "Eq confidence-weighted": "weighted",
}
METHODS = {"Grad-CAM": "grad-cam", "EquiGrad-CAM": "equigrad-cam"}
INTRODUCTION = "the introduction's is of the first 200 classes, its own table says 0.643"
OfMethods = dict[str, ConditionalEq]


def measure(context: Context) -> Iterator[Row]:
    """All pairs, pairs that keep the top-1, pairs weighted by confidence."""
    methods = list(METHODS.values())
    tables = context.evaluate_both(methods)
    found = tables.map(lambda e: {m: summary.conditional(e.table, m, region=e.region) for m in methods})
    start = f"cond.{context.backbone}"
    for name, method in METHODS.items():
        for kind, field in KINDS.items():
            eq: Both[Estimate] = found.map(itemgetter(method)).map(attrgetter(field))
            yield compare(f"{start}.{name}.{kind}", eq, label=f"{method}, {field}")
    kept = found.clean["grad-cam"].consistency_rate
    flips = Both(Estimate(1 - kept.value, 1 - kept.high, 1 - kept.low, kept.n, kept.groups), None)
    yield compare(f"{start}.stable_rate", Both(kept, None), label="the top-1 is kept")
    yield compare(f"{start}.flip_rate", flips, label="the top-1 flips")
    if context.backbone == "resnet50":
        yield compare("cond.gap.resnet50.stable", tables.map(_paired_gap), label="gap, top-1 kept")
        first = context.on_first_classes(tables).clean
        kept = summary.conditional(first.table, "grad-cam", region=first.region).consistency_rate
        label, of_first = "the top-1 is kept, first classes, as the introduction has it", context.labelled
        yield compare(
            "cond.intro.stable_rate",
            Both(kept, None),
            label=label,
            reason=INTRODUCTION,
            of_first_classes=of_first,
        )
    why = Remark("one-network", {"network": context.backbone})
    for claim, label, value in (
        ("cond.max_move.eg", "most that conditioning moves equigrad-cam", _largest_move),
        ("cond.gap.lo", "least gap to grad-cam", lambda of: min(_gap(of, kind) for kind in KINDS.values())),
        ("cond.gap.hi", "largest gap to grad-cam", lambda of: max(_gap(of, kind) for kind in KINDS.values())),
    ):
        yield with_verdict(claim, found.map(value).map(number), "undecided", label=label, why=why)


def _paired_gap(found: Evaluation) -> Estimate:
    """Eq of EquiGrad-CAM minus that of Grad-CAM over the pairs that keep the top-1, paired."""
    several, one = (
        summary.pick(found.table, "eq", method, found.region, each_angle=True)
        for method in ("equigrad-cam", "grad-cam")
    )
    kept = (
        summary.pick_prediction(found.table, "consistent", "grad-cam", each_angle=True).at_pairs_of(one) == 1
    )
    return summary.mean_of(replace(one, value=several.at_pairs_of(one) - one.value), kept)


def _gap(of: OfMethods, kind: str) -> float:
    """Eq of EquiGrad-CAM minus that of Grad-CAM."""
    eg, gc = (getattr(of[method], kind).value for method in ("equigrad-cam", "grad-cam"))
    return float(eg - gc)


def _largest_move(of: OfMethods) -> float:
    """How far conditioning moves the Eq of EquiGrad-CAM."""
    eg = of["equigrad-cam"]
    return max(abs(found.value - eg.all.value) for found in (eg.consistent, eg.weighted))


EXPERIMENT = Experiment(
    "Conditional table: drift where the prediction holds",
    ("cond.resnet50", "cond.vgg16", "cond.vit_b_16", "cond.intro", "cond.max_move", "cond.gap"),
    measure,
)
