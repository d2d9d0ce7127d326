"""Reduced samples: the first images in class order are easier than a class-spread sample of the same size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from equicam.evaluate import statistics, summary
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate, Floats
from equicam.images.items import sample_by_class
from equicam_paper.claims import Claim, claims
from equicam_paper.context import FORWARD_PASSES, Context, Evaluation, another_network
from equicam_paper.measure import constant_maps
from equicam_paper.rows import Both, Remark, Row, compare, costly, not_run, note

POPULATION = 10_000  # the paper's images: samples are shares of them, so that a prefix covers as many classes
GC, EG, AUGMENTED, RECIPRO, RISE = "grad-cam", "equigrad-cam", "aug-score-cam", "recipro-cam", "rise"
SHORT = {"vgg16": "vgg", "vit_b_16": "vit"}  # the paper's short names of networks in claims


@dataclass(frozen=True)
class Samples:
    """Samples of the context's images, evaluated by one protocol."""

    context: Context
    protocol: str

    def evaluate(self, sample: str, method: str = GC) -> Evaluation:
        """The method and EquiGrad-CAM on `prefix591` (of 10,000), `spread1000` or `all` images."""
        items = None
        if sample != "all":
            kind = sample.rstrip("0123456789")
            share = int(sample.removeprefix(kind)) / POPULATION
            ordered = self.context.by_class
            count = max(2, round(share * len(ordered)))
            items = ordered[:count] if kind == "prefix" else sample_by_class(ordered, count)
        return self.context.evaluate([method, EG], protocol=self.protocol, items=items)

    def eq(self, sample: str, method: str) -> Estimate:
        """The mean."""
        return self.evaluate(sample, GC if method == EG else method).eq(method)

    def defined(self, sample: str, method: str) -> Estimate:
        """The mean without constant maps, which the authors' reduced runs leave out."""
        return summary.mean_of(self.column(sample, method))

    def column(self, sample: str, method: str) -> MetricColumn:
        """Eq of every image; NaN where a costly method's map is constant, which the authors' reduced runs leave out."""
        found = self.evaluate(sample, GC if method == EG else method)
        eq = found.column("eq", method)
        if method in (GC, EG):
            return eq
        constant = constant_maps(found, method)
        return replace(eq, value=np.where([constant[i] for i in eq.ids], np.nan, eq.value))

    def stable(self, sample: str) -> Estimate:
        """How often the top-1 survives a rotation."""
        found = self.evaluate(sample)
        return summary.conditional(found.table, GC, region=found.region).consistency_rate

    def margin(self, sample: str, method: str) -> Estimate:
        """EquiGrad-CAM above the method on the same images, constant maps left out."""
        found = self.evaluate(sample, method)
        ours, theirs = found.column("eq", EG), self.column(sample, method)
        return statistics.compare(ours.value, theirs.by_id(ours.ids), group=ours.group).difference


Quantities = dict[str, Callable[[Samples], Estimate]]  # what each claim measures


def _cheap(network: str) -> Quantities:
    short = SHORT.get(network, network)
    prefix = f"matched.prefix591.{network}"
    return {
        f"{prefix}.gc": lambda s: s.eq("prefix591", GC),
        f"{prefix}.inflation": lambda s: _apart(s.column("prefix591", GC), s.column("all", GC)),
        f"matched.prefix2k.{network}": lambda s: s.eq("prefix2000", GC),
        f"matched.spread2k.{short}": lambda s: s.eq("spread2000", GC),
        f"matched.full10k.{short}": lambda s: s.eq("all", GC),
        f"matched.Recipro-CAM.{network}.eg": lambda s: s.eq("prefix2000", EG),
        f"matched.RISE.{network}.eg": lambda s: s.eq("prefix2000", EG),
    } | (_resnet50() if network == "resnet50" else {})


def _resnet50() -> Quantities:
    """Claims about ResNet-50 that do not name it."""
    return {
        "matched.spread2k.r50eg": lambda s: s.eq("spread2000", EG),
        "matched.full10k.r50eg": lambda s: s.eq("all", EG),
        "code.prefix.gc.eq": lambda s: s.eq("prefix2000", GC),
        "code.spread.gc.eq": lambda s: s.eq("spread2000", GC),
        "code.prefix.stable": lambda s: s.stable("prefix2000"),
        "code.spread.stable": lambda s: s.stable("spread2000"),
    }


def _costly(network: str) -> dict[str, Quantities]:
    """By the method that they need."""
    start, short = f"matched.augsc.{network}", SHORT.get(network, network)
    return {
        AUGMENTED: {
            f"{start}.prefix": lambda s: s.defined("prefix591", AUGMENTED),
            f"{start}.spread": lambda s: s.defined("spread1000", AUGMENTED),
            f"{start}.zero_filled": lambda s: s.eq("spread1000", AUGMENTED),
            f"{start}.margin": lambda s: s.margin("spread1000", AUGMENTED),
            f"{start}.cross": lambda s: _apart(s.column("all", EG), s.column("prefix591", AUGMENTED)),
        },
        RECIPRO: {
            f"matched.Recipro-CAM.{network}": lambda s: s.margin("prefix2000", RECIPRO),
            f"matched.recipro.{short}.cross": lambda s: _apart(s.column("all", EG), s.column("prefix2000", RECIPRO)),
        },
        RISE: {f"matched.RISE.{network}": lambda s: s.margin("prefix2000", RISE)},
    }  # fmt: skip


def _apart(a: MetricColumn, b: MetricColumn) -> Estimate:
    """The mean of a over its images minus that of b over its own: images that both have are resampled together."""
    of = dict(zip((*a.ids, *b.ids), (*a.groups, *b.groups), strict=True))
    ids, groups = (np.array(values, dtype=object) for values in (sorted(of), [of[i] for i in sorted(of)]))
    every = replace(a, ids=ids, groups=groups)
    columns: list[Floats] = []
    for one in (a, b):
        value = one.by_id(every.ids)
        columns += [np.nan_to_num(value), (~np.isnan(value)).astype(np.float64)]
    found = statistics.bootstrap(_difference_of_means, *columns, cluster=every.ids, group=every.group)
    return replace(found, n=int(min(columns[1].sum(), columns[3].sum())))


def _difference_of_means(a: Floats, of_a: Floats, b: Floats, of_b: Floats) -> float:
    """Σ a / n_a − Σ b / n_b; NaN if a resample has no image of either."""
    return float(a.sum() / of_a.sum() - b.sum() / of_b.sum()) if of_a.any() and of_b.any() else statistics.NAN


def matched(context: Context) -> Iterator[Row]:
    """Prefixes, class-spread samples and all images; costly methods and EquiGrad-CAM on the same images."""
    if not context.labelled:
        return
    samples = Both.of(partial(Samples, context))
    wanted = _cheap(context.backbone)
    for method, quantities in _costly(context.backbone).items():
        if context.affordable([method]):
            wanted |= quantities
        else:
            reason = costly(FORWARD_PASSES[method])
            yield from (not_run(claim, reason) for claim in quantities if claim in claims())
    for claim, quantity in wanted.items():
        if known := claims().get(claim):
            first, found = known.of_first_classes, samples.map(quantity)
            yield compare(claim, found, label=known.metric, of_first_classes=first)


def _missing(context: Context, claim: Claim) -> Remark:
    why = note("labelled images, which can be ordered by class")
    return another_network(context, claim) if context.labelled else why


MORE = {"matched": {"missing": _missing}}
