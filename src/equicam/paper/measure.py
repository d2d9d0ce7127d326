"""What several experiments measure alike: both protocols, accuracy, constant maps, and pictures of their own choice."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from jaxtyping import Float
from torch import Tensor

from equicam.data.items import Item, digest_items, open_item, sample_by_class
from equicam.data.sources import find_items
from equicam.evaluation import statistics, summary
from equicam.evaluation.evaluate import evaluate
from equicam.evaluation.reasons import ReasonCode
from equicam.evaluation.statistics import Estimate
from equicam.models.images import as_batch, preprocess_image, stack_images
from equicam.paper.context import (
    Bench,
    Claim,
    Line,
    beside,
    claims,
    eq,
    mean_of,
    not_run,
    number,
)

Tables = dict[bool, pa.Table]
"""Rows by the authors' protocol (True) and by ours (False)."""
USUAL = 0.05
"""p above which a difference is called not significant."""
NO_LABEL = "labels that are the model's classes"


def both(
    bench: Bench, methods: Sequence[str], scores: Sequence[str] = ("eq",), *, views: int | None = None
) -> Tables:
    """One evaluation by either protocol."""
    return {p: bench.rows(methods, scores, as_published=p, views=views) for p in (True, False)}


def region(as_published: bool) -> str:
    """Where a protocol compares maps."""
    return "full" if as_published else "disc"


def eq_line(claim: str, tables: Tables, method: str, *, reason: str = "") -> Line:
    """Eq of a method beside a claim; without a claim, beside nothing."""
    ours, theirs = (eq(tables[p], method, as_published=p) for p in (False, True))
    return beside(claim, clean=ours, as_published=theirs, what=method, reason=reason)


def gain_line(claim: str, tables: Tables) -> Line:
    """How much EquiGrad-CAM is above Grad-CAM, in % of it."""
    found = {p: [eq(t, m, as_published=p) for m in ("grad-cam", "equigrad-cam")] for p, t in tables.items()}
    ours, theirs = (number(100 * (b.value / a.value - 1), b.n) for a, b in (found[False], found[True]))
    return beside(claim, clean=ours, as_published=theirs, what="relative gain, %", tolerance=5.0)


def p_line(claim: str, what: str, found: dict[bool, float], n: int) -> Line:
    """A test's log10 p beside a published bound, or beside n.s.; fewer pictures than the paper's decide one way only."""
    known = claims()[claim]
    bound = known.value if isinstance(known.value, float) else None
    holds = found[True] > math.log10(USUAL) if bound is None else found[True] < math.log10(bound)
    decided = holds == (bound is not None) or n >= (known.n or 0)
    verdict = ("matches" if holds else "differs") if decided else "undecided"
    published = "n.s." if bound is None else f"p < {bound:g}"
    ours, theirs = (number(found[p], n) for p in (False, True))
    return Line(claim, what, published, ours, theirs, verdict, "p falls as pictures are added")


def accuracy(rows: pa.Table) -> Estimate | None:
    """The share of pictures that are classified as labelled; None where no label is one of the model's classes."""
    wrong = mean_of(rows, "misclassified", None, None)
    return Estimate(1 - wrong.value, 1 - wrong.high, 1 - wrong.low, wrong.n) if wrong.n else None


def constant(rows: pa.Table, method: str, where: str) -> Estimate:
    """The share of pictures whose map is constant."""
    still = still_maps(rows, method, where)
    return statistics.proportion(sum(still.values()), len(still))


def defined(rows: pa.Table, method: str, where: str) -> Estimate:
    """The mean Eq of the pictures whose map is not constant."""
    found, still = summary.pick(rows, "eq", method, where), still_maps(rows, method, where)
    return statistics.bootstrap(statistics.mean, found.value[[not still[i] for i in found.ids]])


def still_maps(rows: pa.Table, method: str, where: str) -> dict[str, bool]:
    """Whether a picture's Eq is 0 at every angle for a constant map: so it is where the presented map is one."""
    found = summary.pick(rows, "eq", method, where, each_angle=True)
    still: dict[str, bool] = {}
    for picture, why in zip(found.ids, found.reason, strict=True):
        still[picture] = still.get(picture, True) and why == ReasonCode.CONSTANT_MAP
    return still


def items_of(bench: Bench, most: int | None = None) -> list[Item]:
    """The bench's sample, or a class-spread part of it."""
    return sample_by_class(sample_by_class(find_items(bench.data, split=bench.split), bench.n), most)


def rows_of(
    bench: Bench,
    items: Sequence[Item],
    name: str,
    methods: Sequence[str],
    scores: Sequence[str] = ("eq",),
    *,
    as_published: bool,
) -> pa.Table:
    """An evaluation of these very pictures, kept in a file of its own."""
    bench.out.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{bench.model.name} {as_published} {digest_items(items)}".encode()).hexdigest()[:12]
    out = bench.out / f"{name}-{key}.parquet"
    return evaluate(
        bench.model, list(items), methods=methods, scores=scores, as_published=as_published, out=out,
        progress=bench.progress, **bench.options,
    )  # fmt: skip


def pictures(bench: Bench, most: int) -> Float[Tensor, "b c H W"]:
    """A few of the bench's pictures as the model's input."""
    return opened(bench, items_of(bench, most))


def opened(bench: Bench, items: Sequence[Item]) -> Float[Tensor, "b c H W"]:
    """These pictures as the model's input."""
    return as_batch(
        bench.model, stack_images([preprocess_image(bench.model, open_item(item)) for item in items])
    )


def rest(prefixes: tuple[str, ...], done: Sequence[Line], why: Callable[[Claim], str]) -> Iterator[Line]:
    """The claims that were not answered, with what would."""
    answered = {one.claim for one in done}
    for name, known in claims().items():
        if name.startswith(prefixes) and name not in answered:
            yield not_run(name, why(known))
