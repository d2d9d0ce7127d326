"""The protocol's constants as the code has them, constant maps, XGrad-CAM's identity, and numbers nobody can re-run."""

import math
from collections.abc import Iterator

import torch

from equicam.core.transforms import as_transform
from equicam.core.uncertainty import CONSTANT_BELOW
from equicam.core.weights import KeepConfident
from equicam.evaluate import faithfulness, statistics, summary
from equicam.evaluate.equivariance import ANGLES
from equicam.evaluate.statistics import Estimate
from equicam.explain import explain
from equicam.methods import resolve
from equicam.recipe import Recipe
from equicam_paper.claims import Claim, claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment, another_network
from equicam_paper.measure import constant_share
from equicam_paper.rows import (
    Both,
    Remark,
    Row,
    by_definition,
    compare,
    correlation,
    few_images,
    not_run,
    note,
    number,
    with_verdict,
)

METHODS = ("grad-cam", "grad-cam++", "layer-cam", "aug-cam", "equigrad-cam+pcf", "equigrad-cam")
IMAGES = 8
INPUT_SIDE = 224
"""Of the paper's images, in pixels."""
IDENTICAL = 1e-5
"""Largest difference of two maps that are the same but for rounding."""
PLOTTED = "a constant in the authors' figure script, of unknown origin; `equicam-paper reproduce cost` measures cost"
IDENTITY = (
    "an identity where the head is pooling and a linear layer: the gradient is the same at every position"
)
CENTRED = "theirs is centred on the fused map, ours on the mean of the views"
NO_STARS = "no stars here: tests give log10 p, which does not underflow"


def measure(context: Context) -> Iterator[Row]:
    """Published constants and ours."""
    x = context.open_some(IMAGES)
    yield from _constants(x.shape[-1])
    yield _most_constant(context)
    if context.backbone == "resnet50":
        xgrad, plain = (explain(context.model, x, method=m).map for m in ("xgrad-cam", "grad-cam"))
        apart, label = float((xgrad - plain).abs().max()), "largest difference of xgrad-cam and grad-cam"
        same, few = apart < IDENTICAL, few_images(len(x))
        yield with_verdict(
            "xgrad.r50.agree", Both(number(apart, len(x)), None), "by definition" if same else "undecided" if few else "differs",
            label=label, reason=f"{apart:.0e}, {IDENTITY}", why=None if same else few,
        )  # fmt: skip
        yield _readme(context)


def _constants(side: int) -> Iterator[Row]:
    views = resolve(Recipe("equigrad-cam")).fusion.views
    grid = {one.key for one in views.transforms}
    for name, value in (
        ("T", len(views)),
        ("tau", KeepConfident().tau),
        ("insdel_steps", faithfulness.STEPS),
        ("insdel_blur_sigma", _sigma()),
        ("const_std_threshold", CONSTANT_BELOW),
        ("eq_angles_off_grid", sum(as_transform(angle).key not in grid for angle in ANGLES)),
    ):
        yield by_definition(f"const.{name}", value, label=f"{name} = {value:g}")
    theirs, ours = (
        ", ".join(f"{angle:g}" for angle in angles) for angles in (claims()["const.eq_angles"].values, ANGLES)
    )
    verdict = "by definition" if ours == theirs else "differs"
    yield with_verdict("const.eq_angles", Both(None, None), verdict, label=f"angles {ours}", published=theirs)
    reach, (pad,) = side * (math.sqrt(2) - 1) / 2, claims()["const.pad_px"].values
    other = None if side == INPUT_SIDE or reach <= pad else Remark("other-input", {})
    yield with_verdict(
        "const.pad_px", Both(number(reach), None), "by definition" if reach <= pad else "undecided" if other else "differs", published=f"{pad:g}",
        label="pixels of their padding that a rotation uses", reason="their padding is enough; ours reflects as far as a rotation reaches", why=other,
    )  # fmt: skip
    yield not_run("const.significance_star_p", NO_STARS)


def _sigma() -> float:
    """Width of the blur that hides pixels, from its effect on one bright pixel: k(d)/k(0) = exp(−d²/2σ²)."""
    dot = torch.zeros(1, 1, 65, 65, dtype=torch.float64)
    dot[..., 32, 32] = 1
    row = faithfulness.blur_out(dot)[0, 0, 32]
    return 5 / math.sqrt(2 * math.log(float(row[32] / row[37])))


def _most_constant(context: Context) -> Row:
    """The method whose map is most often constant, the Score-CAMs excluded."""

    def most(found: Evaluation) -> tuple[Estimate, str]:
        return max(((constant_share(found, m), m) for m in METHODS), key=lambda pair: pair[0].value)

    worst = context.evaluate_both(METHODS).map(most)
    label = f"constant maps at most, {worst.as_published[1]}"
    return compare("const.imagenet.other", worst.map(lambda w: w[0]), label=label)


def _readme(context: Context) -> Row:
    """PEUM of the gated method against 1 − Eq at 45° alone."""

    def r(found: Evaluation) -> Estimate:
        eq = summary.pick(found.table, "eq", "grad-cam", found.region, each_angle=True)
        peum = summary.pick(found.table, "peum", "equigrad-cam+pcf", "full")
        return correlation(statistics.pearson(peum.value, 1 - eq.value[eq.angles == 45], group=peum.group))

    found = context.evaluate_both(["grad-cam", "equigrad-cam+pcf"], ["eq", "peum"])
    label = "r of gated PEUM with 1 − Eq at 45°"
    return compare("code.readme.peum_r", found.map(r), label=label, reason=CENTRED)


def _missing(context: Context, claim: Claim) -> Remark:
    plotted = note(PLOTTED)
    return plotted if claim.id.startswith("code.time") else another_network(context, claim)


PREFIXES = ("T", "tau", "pad", "insdel", "const_", "significance", "eq_", "imagenet")
EXPERIMENT = Experiment(
    "The protocol's constants",
    (*(f"const.{prefix}" for prefix in PREFIXES), "xgrad.", "code.time", "code.readme"),
    measure,
    missing=_missing,
)
