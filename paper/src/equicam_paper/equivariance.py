"""How well maps follow the image: every method, with and without alignment, against angle, views, blur, gate and budget."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter

import pyarrow.compute as pc

from equicam.core.weights import SoftGate
from equicam.evaluate import summary
from equicam.evaluate.statistics import Estimate, Floats, mean
from equicam.evaluate.summary import SummaryRow
from equicam.methods import find_method, resolve
from equicam.protocol import PAPER
from equicam.recipe import Recipe
from equicam_paper.claims import METHODS, claims
from equicam_paper.context import FORWARD_PASSES, Context, Evaluation
from equicam_paper.measure import SCORE_CAM_WEIGHTS, eq_row, gain_row, of_columns, stretched_row
from equicam_paper.rows import (
    Both,
    Contradiction,
    Remark,
    Row,
    compare,
    costly,
    not_run,
    number,
    scaled,
    with_verdict,
)

FIRST_CLASSES = "on images of the first fifth of the classes, as the published number is"
COVERAGE = "coverage: a map that ignores the image"


def main(context: Context) -> Iterator[Row]:
    """Table main: Eq of each method by both protocols, and the relative gain of EquiGrad-CAM."""
    published = {n: m for n, m in METHODS.items() if any(c.startswith(f"main.{n}.") for c in claims())}
    methods = context.affordable([*published.values(), "coverage"])
    about = {m: claims().get(f"main.{name}.{context.backbone}.eq") for name, m in published.items()}
    first = [m for m, c in about.items() if m in methods and context.labelled and c and c.of_first_classes]
    with context.masked_scores():  # some of the first images are in the sample too
        found = context.evaluate_both(methods)
        on_first = context.evaluate_both(first, items=context.first_images) if first else found
        as_they_are = [m for m in methods if m in PAPER.variants and not find_method(m, PAPER).stretched]
        stretched = [stretched_row(context, found, method) for method in as_they_are]
    for name, method in published.items():
        claim = f"main.{name}.{context.backbone}.eq"
        if method in first:
            yield eq_row(claim, on_first, method, reason=FIRST_CLASSES, first=True)
            yield eq_row("", found, method)
        elif method in methods:
            yield eq_row(claim, found, method, reason=SCORE_CAM_WEIGHTS if method == "score-cam" else "")
        elif claim in claims():
            yield not_run(claim, costly(FORWARD_PASSES[method]))
    yield from stretched
    yield gain_row(f"gain.{context.backbone}", found)
    ignoring = found.map(Evaluation.eq, "coverage")
    yield compare("", ignoring, label=COVERAGE, reason="the full square with zero filling rewards it")


PASSES = {"equal.rise400": ("rise-400", 400), "equal.scorecam80": ("score-cam-80", 81)}
"""The methods that are given the budget of 18 views, and their forward passes, by claim."""
ANOTHER_METHOD = "its weights are plain probabilities, those of the full Score-CAM are not: it says nothing about the budget"


def equal_compute(context: Context) -> Iterator[Row]:
    """RISE with 400 masks and Score-CAM with 80 channels, next to Grad-CAM and to EquiGrad-CAM with the paper's 18 views."""
    published = context.backbone == "resnet50"
    methods = [method for method, _ in PASSES.values()] if context.costly else []
    with context.masked_scores():
        found = context.evaluate_both(["grad-cam", "equigrad-cam", *methods])
        stretched = [stretched_row(context, found, method) for method in methods]
    yield eq_row("", found, "grad-cam", reason="one pass per map")
    reason = "18 passes per map, forward and backward; the budget that the others are given"
    yield eq_row("", found, "equigrad-cam", reason=reason)
    for claim, (method, passes) in PASSES.items():
        if method in methods:
            reason = ANOTHER_METHOD if method == "score-cam-80" else f"{passes} passes per map"
            yield eq_row(claim if published else "", found, method, reason=reason)
        elif published:
            yield not_run(claim, costly(passes))
    yield from stretched


SPACES = ("Unaligned output-space", "Aligned output-space", "Aligned feature-space (EquiGrad-CAM)")
UNALIGNED = "aug-cam − grad-cam: averaging without alignment, raw Eq"
SKILL = "{}: skill above the floor"


def alignment(context: Context) -> Iterator[Row]:
    """Table align: single view, unaligned, aligned in output space, aligned in feature space."""
    methods = {name: METHODS[name] for name in ("Grad-CAM single view", *SPACES)}
    found = context.evaluate_both([*methods.values()])
    for name, method in methods.items():
        yield eq_row(f"align.{name}.{context.backbone}.eq", found, method)
    pairs = summary.contrast(found.clean.table, "equigrad-cam-out", "equigrad-cam")
    above = pairs.difference
    reason = (
        f"the paper calls the two spaces indistinguishable; paired by image, output space is above by {above.value:+.4f} "
        f"[{above.low:+.4f}, {above.high:+.4f}], log10 p {pairs.log10_p:.0f}"
    )
    yield with_verdict(
        "align.locus.maxdiff", found.map(Evaluation.eq_above, "equigrad-cam-out", "equigrad-cam"), "undecided",
        label="output minus feature space", reason=reason, why=Remark("one-network", {"network": context.backbone}),
    )  # fmt: skip
    reason = "paired by image; raw Eq counts what all maps have in common, the skill below does not"
    yield compare("", found.map(Evaluation.eq_above, "aug-cam", "grad-cam"), label=UNALIGNED, reason=reason)
    for method in methods.values():
        lines = found.map(_summary, method)
        reason = f"maps of unrelated images score {lines.clean.floor:.3f} by ours, {lines.as_published.floor:.3f} by theirs"
        skill = lines.map(lambda line: line.skill or number(float("nan"), line.value.n))
        yield compare("", skill, label=SKILL.format(method), reason=reason)


def _summary(found: Evaluation, method: str) -> SummaryRow:
    """Eq, the floor that unrelated images set, and skill: the share of the range above the floor."""
    wanted = {"score": "eq", "method": method, "region": found.region}
    keep = [pc.field(column) == value for column, value in wanted.items()]
    (line,) = summary.summarise(found.table.filter(keep[0] & keep[1] & keep[2]))
    return line


def angles(context: Context) -> Iterator[Row]:
    """Grad-CAM and EquiGrad-CAM at every evaluation angle; the paper's text gives numbers at 135°."""
    methods = {"Grad-CAM": "grad-cam", "EquiGrad-CAM": "equigrad-cam"}
    found = context.evaluate_both(list(methods.values()))
    for name, method in methods.items():
        by = found.map(_by_angle, method)
        for angle in by.clean:
            claim = f"angle135.{context.backbone}.{name}" if angle == 135 else ""
            at: Both[Estimate] = by.map(itemgetter(angle))
            yield compare(claim, at, label=f"{method} at {angle:g}°", published="plotted only")


def _by_angle(found: Evaluation, method: str) -> dict[float, Estimate]:
    return dict(summary.by_angle(found.table, method, region=found.region))


SIGMAS = (2, 4, 8, 16, 32, 64)  # of the blur, in pixels; the paper stops at 16
BLURRED = "grad-cam@blur-{}"
CHANGE_BY_BLUR = "σ = {} − unblurred"  # the label of Eq with a blurred map minus Eq with the map as it is


def blur(context: Context) -> Iterator[Row]:
    """Grad-CAM blurred, and Grad-CAM times the coverage of 18 views, which the paper does not try."""
    names = {sigma: BLURRED.format(sigma) for sigma in SIGMAS}
    found = context.evaluate_both(["grad-cam", *names.values(), "grad-cam@coverage"])
    yield compare("blur.sigma0", found.map(Evaluation.eq, "grad-cam"), label="grad-cam")
    for sigma, name in names.items():
        published = "not in the paper"
        if known := claims().get(f"blur.sigma{sigma}"):
            other = "" if known.is_about(context.backbone, context.domain) else f", of {known.about}"
            published = known.text + other
        yield compare("", found.map(Evaluation.eq, name), label=name, published=published)
    for sigma, name in names.items():
        change, label = found.map(Evaluation.eq_above, name, "grad-cam"), CHANGE_BY_BLUR.format(sigma)
        yield compare(f"blur.sigma{sigma}", change, label=label, reason="paired by image")
    yield compare("", found.map(Evaluation.eq, "grad-cam@coverage"), label="grad-cam@coverage")


GAMMAS = (0.0, 0.25, 0.5, 1.0, 2.0)
CHANGE_BY_GATE = "γ = 2 − γ = 0"
CHANGE_ON_FIRST = f"{CHANGE_BY_GATE}, first classes"  # of the classes that the published range is of


def soft_gate(context: Context) -> Iterator[Row]:
    """Views weighted by p^γ: Eq at each γ, and the change from γ = 0; the claims are about the first classes."""
    found = Both.of(partial(_gated, context))
    on_first = context.on_first_classes(found)
    ungated, of_first = on_first.map(Evaluation.eq, "γ = 0"), context.labelled
    label = "ungated, first classes" if of_first else "ungated"
    yield compare("softgate.ungated", ungated, label=label, of_first_classes=of_first)
    yield compare(
        "softgate.range", on_first.map(Evaluation.eq_above, "γ = 2", "γ = 0"), label=CHANGE_ON_FIRST if of_first else CHANGE_BY_GATE,
        reason="paired by image; of γ = 2 alone, the strongest gate tried", of_first_classes=of_first,
    )  # fmt: skip
    for gamma in GAMMAS:
        yield compare("", found.map(Evaluation.eq, f"γ = {gamma:g}"), label=f"γ = {gamma:g}")
    if of_first:
        change = found.map(Evaluation.eq_above, "γ = 2", "γ = 0")
        yield compare("", change, label=CHANGE_BY_GATE, reason="paired by image")


def _gated(context: Context, protocol: str) -> Evaluation:
    base = resolve(Recipe("equigrad-cam+soft", protocol=protocol))
    methods = {f"γ = {g:g}": replace(base, fusion=replace(base.fusion, weigh=SoftGate(g))) for g in GAMMAS}
    return context.evaluate(methods, protocol=protocol)


VIEWS = (2, 3, 4, 6, 9, 12, 18, 36)
STEPS = ((6, 9), (9, 12), (12, 18))
VIGNETTE = "with zero filling T = 4 falls below T = 3; in the disc T = 3 is below T = 4"
DIP = "T = 4 − T = 3"


def t_sweep(context: Context) -> Iterator[Row]:
    """Eq at each number of views; T = 4 against T = 3 is where the protocols disagree."""
    tables = Both.of(partial(evaluate_views, context))
    start = f"tsweep.{context.backbone}"
    dip = tables.map(Evaluation.eq_above, name_views(4), name_views(3))
    no_dip = {4: Contradiction(scaled(dip.clean, -1), VIGNETTE)}
    for t in VIEWS:
        at = tables.map(Evaluation.eq, name_views(t))
        names = [name for name in (f"{start}.T{t}", f"{start}.T{t}.derived") if name in claims()]
        for name in names or [""]:
            yield compare(name, at, label=f"T = {t}", artefact=no_dip.get(t))
        if (name := f"{start}.frac.T{t}") in claims():
            yield compare(name, tables.map(_share, 1, t), label=f"share of the gain at T = {t}")
    for before, t in STEPS:
        points = tables.map(_share, before, t).map(scaled, 100)
        label = f"points of the gain that T = {t} adds to T = {before}"
        yield compare(f"{start}.add.T{t}", points, label=label)
    yield compare("", dip, label=DIP, reason="paired by image")
    yield compare(f"{start}.base.derived", tables.map(Evaluation.eq, "grad-cam"), label="grad-cam")


def evaluate_views(context: Context, protocol: str) -> Evaluation:
    """EquiGrad-CAM by the number of views; every T up to 18 is a subset of the 36 views, so all are read at once."""
    methods = {name_views(t): resolve(Recipe("equigrad-cam", views=t, protocol=protocol)) for t in VIEWS}
    return context.evaluate(methods | {name_views(1): resolve(Recipe("grad-cam"))}, protocol=protocol)


def name_views(count: int) -> str:
    """EquiGrad-CAM of so many views; of one, Grad-CAM."""
    return f"T = {count}" if count > 1 else "grad-cam"


def _share(found: Evaluation, before: int, t: int) -> Estimate:
    """The share of the gain of 18 views that `t` views add to `before`."""
    return of_columns(_gained, *(found.column("eq", name_views(views)) for views in (t, before, 18, 1)))


def _gained(at: Floats, before: Floats, most: Floats, least: Floats) -> float:
    return (mean(at) - mean(before)) / (mean(most) - mean(least))


FAITHFUL = {"grad-cam": "gc", "equigrad-cam": "eg", "equigrad-cam-out": "", "aug-cam": ""}
"""Our methods, and the paper's short names in claims."""
SHORT = {"resnet50": "r50", "vit_b_16": "vit"}


def faithfulness(context: Context) -> Iterator[Row]:
    """Areas under the insertion and deletion curves; the authors' are 4.8 % low because they step by 1/21."""
    metrics = {"Ins": "insertion", "Del": "deletion"}
    found = context.evaluate_both(list(FAITHFUL), list(metrics.values()))
    for name, metric in metrics.items():
        for method, short in FAITHFUL.items():
            claim = f"faith.{SHORT.get(context.backbone, context.backbone)}.{name}.{short}"
            area = found.map(Evaluation.mean, metric, method)
            yield compare(claim, area, label=f"{method}, {metric}", published="not in the text")


def vit_attribution(context: Context) -> Iterator[Row]:
    """Eq of attention rollout, of gradient × attention, and of EquiGrad-CAM."""
    if context.backbone != "vit_b_16":
        return
    found = context.evaluate_both(["rollout", "transformer-attribution", "equigrad-cam"])
    reason = "gradient × attention, without the relevance propagation of its paper"
    yield eq_row("vitbase.Attention Rollout", found, "rollout")
    yield eq_row("vitbase.Transformer Attribution", found, "transformer-attribution", reason=reason)
    yield eq_row("", found, "equigrad-cam")


def vit_l(context: Context) -> Iterator[Row]:
    """ViT-L/16: Grad-CAM, EquiGrad-CAM and the relative gain."""
    if context.backbone != "vit_l_16":
        return
    found = context.evaluate_both(["grad-cam", "equigrad-cam"])
    yield eq_row("vitl.gc", found, "grad-cam")
    yield eq_row("vitl.eg", found, "equigrad-cam")
    yield gain_row("vitl.gain", found)
