"""Reduced samples: the first pictures in class order are easier than a class-spread sample of the same size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from equicam.data.items import Item, sample_by_class
from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate
from equicam.paper.context import (
    COSTLY,
    Bench,
    Experiment,
    Line,
    claims,
    difference,
    line,
    not_run,
    others,
)
from equicam.paper.context import eq as mean_eq
from equicam.paper.measure import defined, items_of, region, rest, rows_of, still_maps

POPULATION = 10_000
"""The paper's pictures; its samples are taken here as shares of them, so that a prefix covers as many classes."""
GC, EG, AUGMENTED, RECIPRO, RISE = "grad-cam", "equigrad-cam", "aug-score-cam", "recipro-cam", "rise"
SHORT = {"vgg16": "vgg", "vit_b_16": "vit"}


@dataclass(frozen=True)
class Samples:
    """Samples of the bench's pictures, scored by one protocol."""

    bench: Bench
    ordered: list[Item]  # by class
    as_published: bool

    def rows(self, sample: str, method: str = GC) -> pa.Table:
        """The method beside EquiGrad-CAM on `prefix591` (of 10,000), `spread1000` or `all` pictures."""
        if sample == "all":
            return self.bench.rows([method, EG], as_published=self.as_published)
        kind = sample.rstrip("0123456789")
        share = int(sample.removeprefix(kind)) / POPULATION
        most = max(2, round(share * len(self.ordered)))
        items = self.ordered[:most] if kind == "prefix" else sample_by_class(self.ordered, most)
        name = f"matched-{sample}-{method}"
        return rows_of(self.bench, items, name, [method, EG], as_published=self.as_published)

    def eq(self, sample: str, method: str) -> Estimate:
        """The mean."""
        rows = self.rows(sample, GC if method == EG else method)
        return mean_eq(rows, method, as_published=self.as_published)

    def defined(self, sample: str, method: str) -> Estimate:
        """The mean without constant maps, which the authors' reduced runs leave out."""
        return defined(self.rows(sample, method), method, region(self.as_published))

    def stable(self, sample: str) -> Estimate:
        """How often the top-1 survives a turn."""
        return summary.conditional(self.rows(sample), GC, region=region(self.as_published)).consistency_rate

    def margin(self, sample: str, method: str) -> Estimate:
        """EquiGrad-CAM above the method on the same pictures, constant maps left out."""
        rows, where = self.rows(sample, method), region(self.as_published)
        ours, theirs = (summary.pick(rows, "eq", m, where) for m in (EG, method))
        still = still_maps(rows, method, where)
        apart = statistics.compare(np.where([still[i] for i in ours.ids], np.nan, ours.value), theirs.value)
        return Estimate(apart.mean, apart.low, apart.high, apart.n)


Ask = Callable[[Samples], Estimate]


def _cheap(backbone: str) -> dict[str, Ask]:
    short = SHORT.get(backbone, backbone)
    return {
        f"matched.prefix591.{backbone}.gc": lambda s: s.eq("prefix591", GC),
        f"matched.prefix591.{backbone}.inflation": lambda s: difference(
            s.eq("prefix591", GC), s.eq("all", GC)
        ),
        f"matched.prefix2k.{backbone}": lambda s: s.eq("prefix2000", GC),
        f"matched.spread2k.{short}": lambda s: s.eq("spread2000", GC),
        f"matched.full10k.{short}": lambda s: s.eq("all", GC),
        f"matched.Recipro-CAM.{backbone}.eg": lambda s: s.eq("prefix2000", EG),
        f"matched.RISE.{backbone}.eg": lambda s: s.eq("prefix2000", EG),
    } | (_resnet50() if backbone == "resnet50" else {})


def _resnet50() -> dict[str, Ask]:
    """What is published of one network, without its name."""
    return {
        "matched.spread2k.r50eg": lambda s: s.eq("spread2000", EG),
        "matched.full10k.r50eg": lambda s: s.eq("all", EG),
        "code.prefix.gc.eq": lambda s: s.eq("prefix2000", GC),
        "code.spread.gc.eq": lambda s: s.eq("spread2000", GC),
        "code.prefix.stable": lambda s: s.stable("prefix2000"),
        "code.spread.stable": lambda s: s.stable("spread2000"),
    }


def _costly(backbone: str) -> dict[str, Ask]:
    start = f"matched.augsc.{backbone}"
    return {
        f"{start}.prefix": lambda s: s.defined("prefix591", AUGMENTED),
        f"{start}.spread": lambda s: s.defined("spread1000", AUGMENTED),
        f"{start}.zero_filled": lambda s: s.eq("spread1000", AUGMENTED),
        f"{start}.margin": lambda s: s.margin("spread1000", AUGMENTED),
        f"{start}.cross": lambda s: difference(s.eq("all", EG), s.defined("prefix591", AUGMENTED)),
        f"matched.Recipro-CAM.{backbone}": lambda s: s.margin("prefix2000", RECIPRO),
        f"matched.RISE.{backbone}": lambda s: s.margin("prefix2000", RISE),
        f"matched.recipro.{SHORT.get(backbone, backbone)}.cross": lambda s: difference(
            s.eq("all", EG), s.eq("prefix2000", RECIPRO)
        ),
    }


def run(bench: Bench) -> Iterator[Line]:
    """Prefixes, class-spread samples and all, and costly methods beside EquiGrad-CAM on the same pictures."""
    items = items_of(bench)
    if any(item.label is None for item in items):
        yield from rest(EXPERIMENT.answers, [], lambda _: "labelled pictures, for an order by class")
        return
    ordered = sorted(items, key=lambda item: (isinstance(item.label, str), item.label, item.id))
    samples = {p: Samples(bench, ordered, p) for p in (False, True)}
    asked = _cheap(bench.backbone) | (_costly(bench.backbone) if bench.costly else {})
    done = [
        line(name, clean=ask(samples[False]), as_published=ask(samples[True]), what=claims()[name].metric)
        for name, ask in asked.items()
        if name in claims()
    ]
    yield from done
    reason = f"up to {max(COSTLY.values()):,} forward passes a map: --costly, with --n"
    costly = () if bench.costly else _costly(bench.backbone)
    skipped = [not_run(name, reason) for name in costly if name in claims()]
    yield from skipped
    for prefix in EXPERIMENT.answers:
        yield from others(prefix, [*done, *skipped], bench)


EXPERIMENT = Experiment(
    "Reduced samples: prefixes against class-spread ones",
    ("matched.", "code.prefix", "code.spread"),
    run,
    needs="an ImageNet classifier and labelled validation pictures, several a class",
)
