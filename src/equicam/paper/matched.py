"""Reduced samples: the first images in class order are easier than a class-spread sample of the same size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from equicam.data.items import Item, sample_by_class
from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate
from equicam.paper.claims import Claim, claims
from equicam.paper.context import FORWARD_PASSES, Context, Evaluation
from equicam.paper.experiment import Experiment, another_network
from equicam.paper.measure import constant_maps, eq_where_defined
from equicam.paper.rows import Both, Remark, Row, compare, costly, difference, not_run, note

POPULATION = 10_000
"""The paper's images; its samples are taken as shares of them, so that a prefix covers as many classes."""
GC, EG, AUGMENTED, RECIPRO, RISE = "grad-cam", "equigrad-cam", "aug-score-cam", "recipro-cam", "rise"
SHORT = {"vgg16": "vgg", "vit_b_16": "vit"}
"""The paper's short names of networks in claims."""


@dataclass(frozen=True)
class Samples:
    """Samples of the context's images, evaluated by one protocol."""

    context: Context
    as_published: bool

    @cached_property
    def ordered(self) -> list[Item]:
        """The images by class."""
        return sorted(self.context.sample, key=lambda i: (isinstance(i.label, str), i.label, i.id))

    def evaluate(self, sample: str, method: str = GC) -> Evaluation:
        """The method and EquiGrad-CAM on `prefix591` (of 10,000), `spread1000` or `all` images."""
        items = None
        if sample != "all":
            kind = sample.rstrip("0123456789")
            share = int(sample.removeprefix(kind)) / POPULATION
            count = max(2, round(share * len(self.ordered)))
            items = self.ordered[:count] if kind == "prefix" else sample_by_class(self.ordered, count)
        return self.context.evaluate([method, EG], as_published=self.as_published, items=items)

    def eq(self, sample: str, method: str) -> Estimate:
        """The mean."""
        return self.evaluate(sample, GC if method == EG else method).eq(method)

    def defined(self, sample: str, method: str) -> Estimate:
        """The mean without constant maps, which the authors' reduced runs leave out."""
        return eq_where_defined(self.evaluate(sample, method), method)

    def stable(self, sample: str) -> Estimate:
        """How often the top-1 survives a rotation."""
        found = self.evaluate(sample)
        return summary.conditional(found.table, GC, region=found.region).consistency_rate

    def margin(self, sample: str, method: str) -> Estimate:
        """EquiGrad-CAM above the method on the same images, constant maps left out."""
        found = self.evaluate(sample, method)
        ours, theirs = (summary.pick(found.table, "eq", m, found.region) for m in (EG, method))
        constant = constant_maps(found, method)
        kept = np.where([constant[i] for i in ours.ids], np.nan, ours.value)
        apart = statistics.compare(kept, theirs.value)
        return Estimate(apart.mean, apart.low, apart.high, apart.n)


Quantities = dict[str, Callable[[Samples], Estimate]]
"""What each claim measures."""


def _cheap(network: str) -> Quantities:
    short = SHORT.get(network, network)
    prefix = f"matched.prefix591.{network}"
    return {
        f"{prefix}.gc": lambda s: s.eq("prefix591", GC),
        f"{prefix}.inflation": lambda s: difference(s.eq("prefix591", GC), s.eq("all", GC)),
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


def _costly(network: str) -> Quantities:
    start, short = f"matched.augsc.{network}", SHORT.get(network, network)
    return {
        f"{start}.prefix": lambda s: s.defined("prefix591", AUGMENTED),
        f"{start}.spread": lambda s: s.defined("spread1000", AUGMENTED),
        f"{start}.zero_filled": lambda s: s.eq("spread1000", AUGMENTED),
        f"{start}.margin": lambda s: s.margin("spread1000", AUGMENTED),
        f"{start}.cross": lambda s: difference(s.eq("all", EG), s.defined("prefix591", AUGMENTED)),
        f"matched.Recipro-CAM.{network}": lambda s: s.margin("prefix2000", RECIPRO),
        f"matched.RISE.{network}": lambda s: s.margin("prefix2000", RISE),
        f"matched.recipro.{short}.cross": lambda s: difference(s.eq("all", EG), s.eq("prefix2000", RECIPRO)),
    }


def measure(context: Context) -> Iterator[Row]:
    """Prefixes, class-spread samples and all images; costly methods and EquiGrad-CAM on the same images."""
    if not _labelled(context):
        return
    samples = Both(Samples(context, as_published=False), Samples(context, as_published=True))
    costly_ones = _costly(context.backbone)
    for claim, quantity in (_cheap(context.backbone) | (costly_ones if context.costly else {})).items():
        if claim in claims():
            yield compare(claim, samples.map(quantity), label=claims()[claim].metric)
    if not context.costly:
        reason = costly(f"up to {max(FORWARD_PASSES.values()):,}")
        yield from (not_run(claim, reason) for claim in costly_ones if claim in claims())


def _labelled(context: Context) -> bool:
    return all(item.label is not None for item in context.sample)


def _missing(context: Context, claim: Claim) -> Remark:
    if _labelled(context):
        return another_network(context, claim)
    return note("labelled images, which can be ordered by class")


EXPERIMENT = Experiment(
    "Reduced samples: prefixes against class-spread ones",
    ("matched.", "code.prefix", "code.spread"),
    measure,
    needs="an ImageNet classifier and labelled validation images, several per class",
    missing=_missing,
)
